"""Trains the model of run.env with MaxText on every host of the TPU slice(s), under Ray Train.

    python train.py [config.yml] [key=value ...]

The config is a MaxText config (default config/train.yml); key=value overrides it for this run, as MaxText takes it.
The same file runs on the slice and in the rehearsal. It exits with 0 only if the last step was reached.
"""

import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

from ops import hosts, libtpu, run_env

ROOT = Path(__file__).resolve().parent
# How often an elastic run looks for slices that are back. Taking them in costs a restart from the last checkpoint.
RESIZE_SECONDS = float(os.environ.get("RESIZE_SECONDS", "60"))


def train_on_host(job: dict[str, Any]) -> tuple[int, int]:
    """Run on each host, in its own process; return the steps completed and asked for.

    Only here is jax imported: the driver must not touch a TPU.
    """
    import json
    import logging
    import tempfile

    import jax
    import maxtext
    import yaml
    from ray.train import collective, get_context

    rank = get_context().get_world_rank()
    print(f"host {rank}: {os.environ.get('TPU_NAME')}, TPU_WORKER_ID {os.environ.get('TPU_WORKER_ID')}", flush=True)
    if rank > 0:
        # MaxText reports the same global numbers on every host; one log is enough to read. Warnings still show.
        logging.getLogger("absl").setLevel(logging.WARNING)

    # Those of all slices, or in an elastic run of the slices that Ray Train has found whole.
    devices = get_context().get_world_size() * job["devices_per_host"]
    here, everywhere = jax.local_device_count(), jax.device_count()
    if (here, everywhere) != (job["devices_per_host"], devices) or devices not in job["devices"]:
        raise RuntimeError(
            f"host {rank} sees {here} of its devices and {everywhere} in all, but run.env promises "
            f"{job['devices_per_host']} and {' or '.join(map(str, job['devices']))}: wrong topology, or a host that "
            "did not join"
        )
    whole = devices == job["devices"][-1]
    if rank == 0 and not whole:
        print(f"note: training on {devices} of {job['devices'][-1]} devices, so a step has fewer tokens", flush=True)

    # The config's text travels with the job, so that the hosts cannot run another version of it.
    folder = Path(tempfile.mkdtemp(prefix="train-"))
    config, metrics = folder / "train.yml", folder / "metrics.jsonl"
    config.write_text(job["config"])
    settings = yaml.safe_load(job["config"]) | dict(override.split("=", 1) for override in job["overrides"])
    overrides = [*job["overrides"], f"metrics_file={metrics}"]
    carried = Path(maxtext.__file__).parent / "assets" / "tokenizers" / str(settings.get("tokenizer_path") or "none")
    if carried.exists():  # the tokenizer is one that the MaxText package carries
        overrides.append(f"tokenizer_path={carried}")
    if whole and job["kept_step"] and Path(job["kept_step"]).exists():  # compiled for all slices
        overrides.append(f"compiled_trainstep_file={job['kept_step']}")

    from maxtext.trainers.pre_train.train import main

    collective.barrier()  # imports take hosts unequally long, and the first collective waits for 30 s only
    main(["train.py", str(config), *overrides])

    # MaxText ends quietly when the data runs out. Returned, not raised: no restart would find more of it.
    last = int(json.loads(metrics.read_text().splitlines()[-1])["step"]) if metrics.exists() else -1
    return last + 1, int(settings["steps"])


def main() -> int:
    """Train until the last step; exit code 0 when it was reached, 1 when not, 2 for wrong arguments."""
    arguments = sys.argv[1:]
    named = arguments and arguments[0].endswith((".yml", ".yaml"))
    config = Path(arguments.pop(0)) if named else ROOT / "config" / "train.yml"
    if not config.is_file():
        print(f"error: there is no config {config}")
        return 2
    if wrong := [argument for argument in arguments if "=" not in argument]:
        print(f"error: '{wrong[0]}' is no override: give key=value, e.g. steps=200")
        return 2
    run = run_env.load()
    flags = libtpu.read_flags()
    # cpu as well: MaxText keeps arrays on the host
    platforms = os.environ.get("JAX_PLATFORMS", "tpu,cpu")
    kept_step = ""
    if "tpu" in platforms and not libtpu.missing():
        # Here it takes seconds; on the slice a wrong flag ends every host's process.
        if refused := libtpu.check_flags(flags, run.generation):
            print(f"error: {refused}")
            return 1
        made_of = libtpu.fingerprint(config.read_text(), arguments, flags, run.compile_topology, run.num_slices)
        kept_step, reason = libtpu.kept_step(made_of)
        if reason:
            print(f"note: {reason}", flush=True)

    trainer = JaxTrainer(
        train_on_host,
        train_loop_config={
            "config": config.read_text(),
            "overrides": arguments,
            "kept_step": kept_step,
            "devices_per_host": run.devices_per_host,
            "devices": run.device_counts,
        },
        scaling_config=ScalingConfig(
            use_tpu=True,
            accelerator_type=run.ray_accelerator_type,
            topology=run.topology,
            # With two numbers Ray Train goes on with fewer whole slices, and takes more as soon as they are back.
            num_workers=(run.min_slices * run.hosts_per_slice, run.num_hosts) if run.elastic else run.num_hosts,
            elastic_resize_monitor_interval_s=RESIZE_SECONDS,
            resources_per_worker={"TPU": run.chips_per_host},
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name=run.run_name,
            # Ray's own state only; the checkpoints are MaxText's, in base_output_directory.
            storage_path=os.environ.get("RAY_STORAGE_PATH") or f"gs://{run.bucket}/{run.project_name}/ray",
            # A lost host restarts all workers, and MaxText resumes from its last checkpoint: this many times.
            failure_config=FailureConfig(max_failures=run.max_failures),
            worker_runtime_env={
                "env_vars": {
                    "JAX_PLATFORMS": platforms,
                    "LIBTPU_INIT_ARGS": " ".join(flags),
                }
            },
        ),
    )
    ray.init()
    try:
        hosts.wait(run)
        hosts.watch(run)
        result = trainer.fit()
    except (TimeoutError, ray.train.TrainingFailedError) as error:
        print(f"error: {error}", flush=True)
        return 1
    completed, asked = result.return_value
    if completed < asked:
        print(
            f"error: the data ran out after {completed} of {asked} steps: give more of it, or set num_epoch", flush=True
        )
        return 1
    print(f"{run.run_name}: all {asked} steps are done", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except run_env.RunEnvError as error:
        sys.exit(f"error: {error}")
