"""Runs the small job of a rendered repository for the measurements; a part of them, not one itself.

    python job.py ray STEPS                 under JaxTrainer, on the simulated slices
    python job.py hand STEPS PROCESSES      PROCESSES started by hand, joined by jax.distributed when there are several

To be run inside the rendered repository, with its Python. The last line is the seconds of each step, as JSON.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path.cwd()))

from ops import rehearse, run_env, small_model, terminal
from ops.run_log import completed_step
from ops.simulated_slice import SimulatedSlices, free_port

LIMIT_SECONDS = 1800


def settings_of(run: run_env.RunEnv, config: Path) -> list[str]:
    """The settings of a rehearsal, as key=value for MaxText."""
    return rehearse.overrides(run, yaml.safe_load(config.read_text()))[0]


def prepare(run: run_env.RunEnv, steps: int) -> None:
    """Write the data and the run.env that the job reads, as a rehearsal does, and forget earlier checkpoints."""
    shutil.rmtree(rehearse.FOLDER / "output", ignore_errors=True)
    rehearse.FOLDER.mkdir(parents=True, exist_ok=True)
    rehearse.write_run_env(run, rehearse.FOLDER / "run.env")
    if not (rehearse.FOLDER / "data").exists():
        rehearse.write_data(
            rehearse.FOLDER / "data", run.num_hosts, steps * run.num_devices * small_model.SEQUENCE_LENGTH
        )


def under_ray(run: run_env.RunEnv, settings: list[str], steps: int) -> list[float]:
    """Seconds of each step under JaxTrainer."""
    environment = rehearse.worker_environment(run)
    driver = environment | {
        "RUN_ENV": str(rehearse.FOLDER / "run.env"),
        "RAY_STORAGE_PATH": str(rehearse.FOLDER / "ray"),
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    }
    with SimulatedSlices(run) as slices, terminal.Progress() as progress:
        slices.start_head()
        slices.start_hosts(environment)
        trainer = rehearse.Trainer(slices, settings, dict(os.environ) | driver, progress)
        start = trainer.start("under Ray", steps, rehearse.FOLDER / "bench-ray.log")
    if start.returncode:
        sys.exit(f"the trainer failed: {start.error}")
    return [step.seconds for step in start.steps]


def by_hand(run: run_env.RunEnv, settings: list[str], steps: int, processes: int) -> list[float]:
    """Seconds of each step with `processes` processes that share the devices of all slices evenly."""
    environment = os.environ | rehearse.worker_environment(run)
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={run.num_devices // processes}"
    coordinator = f"127.0.0.1:{free_port()}"
    logs = [rehearse.FOLDER / f"bench-hand-{number}.log" for number in range(processes)]
    started = []
    try:
        for number, log in enumerate(logs):
            command = [sys.executable, __file__, "process", coordinator, str(processes), str(number)]
            with log.open("w") as sink:
                started.append(
                    subprocess.Popen(
                        [*command, "config/train.yml", *settings, f"steps={steps}"],
                        env=environment,
                        stdout=sink,
                        stderr=subprocess.STDOUT,
                    )
                )
        codes = [process.wait(LIMIT_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(codes):
        sys.exit(f"a process failed: see {logs[codes.index(max(codes))]}")
    return [step.seconds for line in logs[0].read_text().splitlines() if (step := completed_step(line))]


def process(coordinator: str, processes: int, number: int, arguments: list[str]) -> None:
    """Be one of the processes started by hand."""
    import jax
    from absl import logging

    logging.set_verbosity(logging.INFO)  # MaxText reports its steps there
    if processes > 1:
        jax.distributed.initialize(coordinator, num_processes=processes, process_id=number)
    carried = small_model.maxtext_folder() / "assets" / "tokenizers"
    settings = dict(argument.split("=", 1) for argument in arguments if "=" in argument)

    from maxtext.trainers.pre_train.train import main

    main(["train.py", *arguments, f"tokenizer_path={carried / settings['tokenizer_path']}"])


def main() -> None:
    """See the module's first lines."""
    if sys.argv[1] == "process":
        process(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what was started, like Ctrl-C
    run = run_env.load()
    steps = int(sys.argv[2])
    prepare(run, steps)
    settings = [*settings_of(run, Path("config/train.yml")), *sys.argv[4 if sys.argv[1] == "hand" else 3 :]]
    if sys.argv[1] == "ray":
        seconds = under_ray(run, settings, steps)
    else:
        seconds = by_hand(run, settings, steps, int(sys.argv[3]))
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
