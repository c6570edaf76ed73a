"""Rehearse the whole job on this machine: simulated TPU hosts, the real trainer, a small model of the same kind.

It trains, checkpoints, starts again, and shows that the second start goes on where the first one stopped. Nothing here
needs a cloud account or a network. What it writes lies in build/rehearsal.
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from ops import run_env, small_model, terminal, verdict
from ops.peak_memory import PeakMemory
from ops.rehearsed_start import Event, RehearsalError, Start, Trainer, committed_steps
from ops.run_env import ROOT, RunEnv
from ops.simulated_slice import SimulatedSlices
from ops.terminal import Check

FOLDER = ROOT / "build" / "rehearsal"
TEXT = ROOT / "rehearsal" / "text.txt"
FIRST_STEPS = 8
CHECKPOINT_PERIOD = 4
MORE_STEPS = 4
# With a slice that is lost and comes back the rehearsal ends the run: how many steps pass depends on the machine.
ENDLESS_STEPS = 1_000_000
ELASTIC_SECONDS = 1200  # at most; it takes about 380 on 2 cores
RESIZE_SECONDS = 10  # how often the trainer looks for a slice that is back
# Measured on 2 cores with maxtext 0.2.5: what a Ray worker with a small model takes, and Ray's own processes.
GIB_PER_HOST = 1.4
GIB_FOR_RAY = 1.8


def scaled(run: RunEnv, cores: int, available_gib: float) -> tuple[RunEnv, list[str]]:
    """Return `run` on the slices that this machine can hold, and notices of what is smaller than promised.

    A slice of several hosts keeps several, and every slice stays. Raises RehearsalError when not even that fits.
    """
    notices = []
    possible = int((available_gib - GIB_FOR_RAY) / GIB_PER_HOST)
    if run.num_hosts > min(possible, max(4, 2 * cores)) and run.hosts_per_slice > 1:
        # The smallest slice of several hosts: 4 chips a host, in two or in three dimensions of ICI.
        topology = "4x4" if run.topology.count("x") == 1 else "2x2x2"
        chips = math.prod(map(int, topology.split("x")))
        hosts = chips // run.chips_per_host
        if hosts < run.hosts_per_slice:
            notices.append(
                f"each slice is simulated as {topology} with {hosts} hosts instead of {run.topology} with "
                f"{run.hosts_per_slice} ({cores} cores, {available_gib:.0f} GiB free here): the same job on fewer hosts"
            )

            def renumbered(name: str) -> str:
                prefix, number = name.rsplit("-", 1)
                return f"{prefix}-{int(number) * chips // run.chips_per_slice}"

            run = dataclasses.replace(
                run,
                topology=topology,
                hosts_per_slice=hosts,
                chips_per_slice=chips,
                devices_per_slice=hosts * run.devices_per_host,
                ray_pod_type=renumbered(run.ray_pod_type),
                gke_tpu_env=renumbered(run.gke_tpu_env),
                compile_topology=renumbered(run.compile_topology),
            )
    if run.num_hosts > possible:
        raise RehearsalError(
            f"{run.slice_text} needs {run.num_hosts} simulated hosts of about {GIB_PER_HOST} GiB each and "
            f"{GIB_FOR_RAY} GiB for Ray, but only {available_gib:.1f} GiB of memory are free: close programs, "
            "or rehearse on a larger machine"
        )
    return run, notices


def write_run_env(run: RunEnv, file: Path) -> None:
    """Write `run` as a run.env, so that train.py reads the simulated slice as it reads the real one."""
    values = dataclasses.asdict(run)
    file.write_text("".join(f"{key.upper()}={value}\n" for key, value in values.items()), encoding="utf-8")


def write_data(folder: Path, hosts: int, tokens: int) -> None:
    """Write the repository's text as one Parquet file a host, repeated until it holds at least `tokens` tokens."""
    paragraphs = [" ".join(part.split()) for part in TEXT.read_text(encoding="utf-8").split("\n\n") if part.strip()]
    # A token is at most a word for the tokenizers here; a document longer than the sequence is cut.
    words = sum(min(len(paragraph.split()), small_model.SEQUENCE_LENGTH) for paragraph in paragraphs)
    paragraphs *= math.ceil(2 * tokens / words)
    folder.mkdir(parents=True)
    for host in range(hosts):
        pq.write_table(pa.table({"text": paragraphs[host::hosts]}), folder / f"text-{host:03}.parquet")


def overrides(run: RunEnv, config: dict[str, Any], dataset_type: str = "grain") -> tuple[list[str], list[str]]:
    """Return what the rehearsal changes in the run's MaxText config, as key=value, and notices to print."""
    notices = []
    mesh = small_model.small_mesh(config, run.devices_per_slice)
    tokenizer, own = small_model.tokenizer(config)
    if not own:
        notices.append(
            f"the MaxText package does not carry the run's tokenizer: {tokenizer['tokenizer_path']} stands in for it"
        )
    vocabulary = None if own else small_model.STAND_IN_VOCABULARY
    model = small_model.small_model(run.model, mesh, run.devices_per_slice, vocabulary)
    settings = {
        **mesh,
        **model,
        **tokenizer,
        "override_model_config": True,
        "hardware": "cpu",
        "skip_jax_distributed_system": True,  # Ray Train has started it
        "base_output_directory": FOLDER / "output",
        # Outlives a rehearsal: the next one compiles less. Not with several hosts: on CPUs only the first would find
        # its programs there, and then wait for the others in a first collective that gives up after 30 s.
        "jax_cache_dir": FOLDER.parent / "jax-cache" if run.num_hosts == 1 else "",
        "dataset_type": dataset_type,
        "grain_file_type": "parquet",
        "grain_train_files": FOLDER / "data" / "*.parquet",
        "grain_worker_count": 0,
        "max_target_length": small_model.SEQUENCE_LENGTH,
        "per_device_batch_size": 1,
        "learning_rate": 0.003,
        "checkpoint_period": CHECKPOINT_PERIOD,
        # Kernels and placements that only a TPU has.
        "attention": "dot_product",
        "use_tokamax_splash": False,
        "megablox": False,
        "sparse_matmul": False,
        "remat_policy": "full",
        "enable_tensorboard": False,
        "log_config": False,
    }
    return [f"{key}={value}" for key, value in settings.items()], notices


def worker_environment(run: RunEnv) -> dict[str, str]:
    """Return the environment of every simulated host's workers: CPU devices in place of TPU devices."""
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={run.devices_per_host}",
        "DECOUPLE_GCLOUD": "TRUE",  # MaxText's own switch for machines without Google Cloud
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def rehearse(lose_worker: bool, lose_slice: bool = False) -> bool:
    """Rehearse once and print the verdict. Return whether every point holds. Raises RehearsalError."""
    began = time.monotonic()
    promised = run_env.load()
    config = yaml.safe_load((ROOT / "config" / "train.yml").read_text(encoding="utf-8"))
    run, notices = scaled(promised, os.cpu_count() or 1, psutil.virtual_memory().available / 2**30)
    if lose_slice and not run.elastic:
        raise RehearsalError(
            f"the run needs all of its slices ({run.slice_text}). To let it go on with fewer: "
            'make reconfigure ARGS="num_slices=2 min_slices=1"'
        )
    total = FIRST_STEPS + MORE_STEPS
    # Grain cannot resume on another number of hosts: see the rule of min_slices.
    settings, more_notices = overrides(run, config, "synthetic" if lose_slice else "grain")
    if lose_slice:
        settings.append(f"learning_rate_schedule_steps={total}")  # else it would still be warming up at the end

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    write_run_env(run, FOLDER / "run.env")
    write_data(FOLDER / "data", run.num_hosts, total * run.num_devices * small_model.SEQUENCE_LENGTH)
    checkpoints = FOLDER / "output" / run.run_name / "checkpoints"

    terminal.console.print(
        f"Rehearsing {promised.model} on {promised.slice_text}: {run.num_hosts} simulated "
        f"{'host' if run.num_hosts == 1 else 'hosts'}, "
        f"{run.num_devices} devices. Logs: {FOLDER.relative_to(ROOT)}"
    )
    for text in notices + more_notices:
        terminal.notice(text)

    environment = worker_environment(run)
    driver = environment | {
        "RUN_ENV": str(FOLDER / "run.env"),
        "RAY_STORAGE_PATH": str(FOLDER / "ray"),
        "HOST_WAIT_MINUTES": "5",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # nobody preempts a simulated host
        "RESIZE_SECONDS": str(RESIZE_SECONDS),
    }
    peak = PeakMemory()
    with SimulatedSlices(run) as slices, terminal.Progress() as progress:
        peak.follow(slices)
        progress.update("hosts", "starting Ray")
        slices.start_head()
        # The trainer takes a while to start, and waits for its hosts as it does on the cluster.
        failures: list[BaseException] = []

        def start_hosts(slice_id: int | None = None) -> None:
            try:
                if slice_id is None:
                    slices.start_hosts(environment)
                else:
                    slices.start_slice(slice_id, environment)
            except BaseException as error:  # handed to the main thread below
                failures.append(error)
                trainer.aborted.set()

        # A copy: while a host starts, this process's own environment is that host's.
        trainer = Trainer(slices, settings, dict(os.environ) | driver, checkpoints, progress)
        threading.Thread(target=start_hosts, daemon=True).start()
        last, fewer = run.num_slices - 1, run.num_devices - run.devices_per_slice

        def has_saved(start: Start) -> bool:
            return bool(start.attempts) and len(start.attempts[-1].steps) > CHECKPOINT_PERIOD + 1

        try:
            if lose_worker:
                events = [Event(has_saved, trainer.lose_worker)]
                first = trainer.start("train, lose a worker", total, FOLDER / "train-1.log", events)
                second = None
                saved = first.saved
            elif lose_slice:
                again = threading.Thread(target=start_hosts, args=[last], daemon=True)
                events = [
                    Event(has_saved, lambda: slices.lose_slice(last)),
                    Event(lambda start: has_saved(start) and verdict.trained_on(start, fewer), again.start),
                    Event(lambda start: verdict.trained_on(start, fewer, run.num_devices), trainer.aborted.set),
                ]
                first = trainer.start(
                    "train, lose a slice", ENDLESS_STEPS, FOLDER / "train-1.log", events, ELASTIC_SECONDS
                )
                second = None
                saved = first.saved
            else:
                first = trainer.start("first start", FIRST_STEPS, FOLDER / "train-1.log")
                saved = committed_steps(checkpoints)
                second = None
                if first.returncode == 0 and not failures:
                    second = trainer.start("second start", total, FOLDER / "train-2.log")
        finally:
            if sys.exc_info()[0] or failures:
                slices.keep_logs(FOLDER / "ray-logs")
        if failures:
            raise failures[0]
        points = verdict.checks(run, first, saved)
        if lose_slice:
            points += verdict.elastic_checks(run, first)
        else:
            points += verdict.restart_checks(first, second, saved, total)
        if not all(point.passed for point in points):
            slices.keep_logs(FOLDER / "ray-logs")
        peak.stop()
    passed = terminal.verdict(f"Rehearsal of {promised.model} on {promised.slice_text}", points)
    for start, log in ((first, "train-1.log"), (second, "train-2.log")):
        if not passed and start and start.returncode and start.error:
            terminal.error(f"{start.error} (all of it: {FOLDER.relative_to(ROOT) / log})")
    write_report(began, first, second, peak, points)
    return passed


def write_report(began: float, first: Start, second: Start | None, peak: PeakMemory, points: list[Check]) -> None:
    """Write what was measured to build/rehearsal/report.json and print its summary."""
    seconds = time.monotonic() - began
    report = {
        "passed": all(point.passed for point in points),
        "seconds": round(seconds, 1),
        "peak_memory_gib": round(peak.gib, 2),
        "starts": [dataclasses.asdict(start) | {"placed": sorted(start.placed)} for start in (first, second) if start],
        "checks": [dataclasses.asdict(point) for point in points],
    }
    (FOLDER / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    terminal.console.print(f"{seconds:.0f} s, at most {peak.gib:.1f} GiB of memory; all that was started has ended.")


def main() -> int:
    """Rehearse; exit code 0 when every point of the verdict holds, 1 when one does not, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="make rehearse", description=__doc__)
    loss = parser.add_mutually_exclusive_group()
    loss.add_argument("--lose-worker", action="store_true", help="kill a worker mid-run, not a second start")
    loss.add_argument("--lose-slice", action="store_true", help="kill a slice mid-run, and start it again later")
    arguments = parser.parse_args()
    try:
        return 0 if rehearse(arguments.lose_worker, arguments.lose_slice) else 1
    except KeyboardInterrupt:
        terminal.error("interrupted; everything that was started has been ended")
        raise


if __name__ == "__main__":
    terminal.run(main)
