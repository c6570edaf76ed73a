"""Runs the small job of a rendered repository for the measurements; a part of them, not one itself.

    python job.py ray STEPS                           under JaxTrainer, on the simulated slices
    python job.py hand STEPS PROCESSES [key=value]    started by hand, joined by jax.distributed when there are several

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

from ops import rehearse, run_env, small_model
from ops.run_log import completed_step
from ops.simulated_slice import free_port

LIMIT_SECONDS = 1800


def under_ray(steps: int) -> list[float]:
    """Seconds of each step under JaxTrainer: a rehearsal whose first start is `steps` long."""
    rehearse.FIRST_STEPS = steps
    if not rehearse.rehearse(lose_worker=False):
        sys.exit("the rehearsal failed: its verdict is above")
    report = json.loads((rehearse.FOLDER / "report.json").read_text())
    return [step["seconds"] for step in report["starts"][0]["steps"]]


def by_hand(steps: int, processes: int, more: list[str]) -> list[float]:
    """Seconds of each step with `processes` processes that share the devices of all slices evenly.

    Trains on the data of the last rehearsal, with its settings; `more` are further ones.
    """
    if not (rehearse.FOLDER / "data").exists():
        sys.exit("there is no data: run the rehearsal first")
    shutil.rmtree(rehearse.FOLDER / "output", ignore_errors=True)
    run = run_env.load()
    settings = [*rehearse.overrides(run, yaml.safe_load(Path("config/train.yml").read_text()))[0], *more]
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
    steps = int(sys.argv[2])
    seconds = under_ray(steps) if sys.argv[1] == "ray" else by_hand(steps, int(sys.argv[3]), sys.argv[4:])
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
