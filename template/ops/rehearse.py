"""Rehearse the whole job on this machine: simulated TPU hosts, the real trainer, a small model of the same kind.

It trains, checkpoints, starts again, and shows that the second start goes on where the first one stopped. Nothing here
needs a cloud account or a network. What it writes lies in build/rehearsal.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from ops import run_env, small_model, terminal
from ops.run_env import ROOT, RunEnv
from ops.run_log import Step, completed_step
from ops.simulated_slice import SimulatedSlices, SliceError
from ops.terminal import Check

FOLDER = ROOT / "build" / "rehearsal"
TEXT = ROOT / "rehearsal" / "text.txt"
FIRST_STEPS = 8
CHECKPOINT_PERIOD = 4
MORE_STEPS = 4
# Measured on 2 cores with maxtext 0.2.5: what a Ray worker with a small model takes, and Ray's own processes.
GIB_PER_HOST = 1.4
GIB_FOR_RAY = 1.8
# Ray Train says so every second where there is no dashboard, as here; on the cluster there is one.
NO_DASHBOARD = "State API may be temporarily unavailable"
SILENCE_SECONDS = 300  # a start that logs nothing for so long has hung


class RehearsalError(Exception):
    """The rehearsal cannot go on; the message says why and what to do."""


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


def overrides(run: RunEnv, config: dict[str, Any]) -> tuple[list[str], list[str]]:
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
        "jax_cache_dir": FOLDER.parent / "jax-cache",  # outlives a rehearsal: the next one compiles less
        "dataset_type": "grain",
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


@dataclasses.dataclass
class Start:
    """One start of train.py and what its log showed."""

    returncode: int
    steps: list[Step]
    placed: set[tuple[str, str]]  # (slice name, worker id) of every Ray Train worker
    mesh_devices: int | None
    seconds: dict[str, float]  # when things happened first, since the start
    error: str


class Trainer:
    """Runs train.py against the simulated slices, follows its log, and never leaves it running."""

    def __init__(
        self, slices: SimulatedSlices, settings: list[str], environment: dict[str, str], progress: terminal.Progress
    ) -> None:
        self.slices = slices
        self.settings = settings
        self.environment = environment
        self.progress = progress
        self.aborted = threading.Event()  # set it to end a start early

    def start(self, phase: str, steps: int, log: Path, lose_worker_at: int | None = None) -> Start:
        """Run train.py for `steps` steps; with `lose_worker_at` kill one worker once that step is complete.

        Raises RehearsalError when it is silent for SILENCE_SECONDS.
        """
        began = time.monotonic()
        result = Start(1, [], set(), None, {}, "")
        with (
            log.open("w", encoding="utf-8") as sink,
            subprocess.Popen(
                [sys.executable, "-u", "train.py", *self.settings, f"steps={steps}"],
                cwd=ROOT,
                env=self.environment | {"RAY_ADDRESS": self.slices.address},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches the rehearsal, which then ends the trainer
            ) as process,
        ):
            heard = [time.monotonic()]
            hung = threading.Event()

            def guard() -> None:
                while process.poll() is None:
                    if time.monotonic() - heard[0] > SILENCE_SECONDS:
                        hung.set()
                    if hung.is_set() or self.aborted.is_set():
                        process.kill()
                        return
                    time.sleep(0.5)

            threading.Thread(target=guard, daemon=True).start()
            self.progress.update(phase, "starting the trainer")
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if NO_DASHBOARD in line:
                        continue
                    heard[0] = time.monotonic()
                    sink.write(line)
                    sink.flush()
                    self._read(line, result, time.monotonic() - began, phase)
                    if lose_worker_at is not None and result.steps and result.steps[-1].step >= lose_worker_at:
                        self._lose_worker()
                        lose_worker_at = None
                result.returncode = process.wait()
            finally:
                process.kill()
        if hung.is_set():
            raise RehearsalError(f"train.py logged nothing for {SILENCE_SECONDS} s and was ended: see {log}")
        result.seconds["end"] = time.monotonic() - began
        return result

    def _read(self, line: str, result: Start, now: float, phase: str) -> None:
        if step := completed_step(line):
            result.seconds.setdefault("first step", now)
            result.steps.append(step)
            self.progress.update(
                phase, f"step {step.step}  loss {step.loss:.3f}  {step.tokens_per_device:.0f} tokens/s/device"
            )
        elif found := re.search(r"host \d+: (\S+), TPU_WORKER_ID (\S+)", line):
            result.seconds.setdefault("worker", now)
            result.placed.add((found[1], found[2]))
            self.progress.update(phase, "importing MaxText on every host")
        elif found := re.search(r"Num_devices: (\d+), shape", line):
            result.seconds.setdefault("mesh", now)
            result.mesh_devices = int(found[1])
            self.progress.update(phase, "compiling the step")
        elif "error: " in line or re.match(r"\S*(Error|Exception)\b", line.split("ip=")[-1].partition(") ")[2] or line):
            result.error = line.strip()

    def _lose_worker(self) -> None:
        """Kill one Ray Train worker outright, as a lost host would end it."""
        workers = [process for process in self.slices.processes() if "RayTrainWorker" in process_name(process)]
        if not workers:
            raise RehearsalError("found no Ray Train worker to lose: please report this with build/rehearsal")
        workers[-1].kill()


def process_name(process: psutil.Process) -> str:
    """Return what `ps` shows for `process`, empty when it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def committed_steps(folder: Path) -> list[int]:
    """Return the steps of the complete Orbax checkpoints in `folder`, ascending."""
    if not folder.is_dir():
        return []
    return sorted(
        int(entry.name)
        for entry in folder.iterdir()
        if entry.name.isdecimal() and (entry / "_CHECKPOINT_METADATA").is_file()
    )


def checks(run: RunEnv, first: Start, second: Start | None, saved: list[int], total: int) -> list[Check]:
    """Return the points of the verdict. `saved` are the steps committed when the first start ended or was broken."""
    last = second or first
    losses = [step.loss for step in first.steps]
    finite = bool(losses) and all(map(math.isfinite, losses))
    resumed = resumed_at(first, second)
    expected = saved[-1] + 1 if saved else None
    return [
        Check(
            "hosts placed one to one",
            len(first.placed) == run.num_hosts,
            f"{len(first.placed)} of {run.num_hosts} hosts have a worker of their own ({run.slice_text})",
        ),
        Check(
            "devices and mesh as promised",
            first.mesh_devices == run.num_devices,
            f"mesh over {first.mesh_devices} of {run.num_devices} devices",
        ),
        Check(
            "loss finite and falling",
            finite and losses[-1] < losses[0],
            f"{losses[0]:.3f} at step {first.steps[0].step}, {losses[-1]:.3f} at step {first.steps[-1].step}"
            if losses
            else "no step",
        ),
        Check("checkpoint committed", bool(saved) and saved[-1] > 0, f"steps {', '.join(map(str, saved)) or 'none'}"),
        Check(
            "resumed at the right step",
            resumed is not None and resumed == expected,
            f"went on with step {resumed} after checkpoint {saved[-1] if saved else 'none'}",
        ),
        Check(
            "ended well",
            last.returncode == 0 and bool(last.steps) and last.steps[-1].step == total - 1,
            f"exit code {last.returncode} after step {last.steps[-1].step if last.steps else 'none'} of {total}",
        ),
    ]


def resumed_at(first: Start, second: Start | None) -> int | None:
    """Return the first step after the restart: of the second start, or inside the first where the numbers jump back."""
    if second is not None:
        return second.steps[0].step if second.steps else None
    for before, after in itertools.pairwise(first.steps):
        if after.step <= before.step:
            return after.step
    return None


def rehearse(lose_worker: bool) -> bool:
    """Rehearse once and print the verdict. Return whether every point holds. Raises RehearsalError."""
    began = time.monotonic()
    promised = run_env.load()
    config = yaml.safe_load((ROOT / "config" / "train.yml").read_text(encoding="utf-8"))
    run, notices = scaled(promised, os.cpu_count() or 1, psutil.virtual_memory().available / 2**30)
    total = FIRST_STEPS + MORE_STEPS
    settings, more_notices = overrides(run, config)

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    write_run_env(run, FOLDER / "run.env")
    write_data(FOLDER / "data", run.num_hosts, total * run.num_devices * small_model.SEQUENCE_LENGTH)
    checkpoints = FOLDER / "output" / run.run_name / "checkpoints"

    terminal.console.print(
        f"Rehearsing {promised.model} on {promised.slice_text}: {run.num_hosts} simulated hosts, "
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
    }
    peak = PeakMemory()
    with SimulatedSlices(run) as slices, terminal.Progress() as progress:
        peak.follow(slices)
        progress.update("hosts", "starting Ray")
        slices.start_head()
        # The trainer takes a while to start, and waits for its hosts as it does on the cluster.
        failures: list[BaseException] = []

        def start_hosts() -> None:
            try:
                slices.start_hosts(environment)
            except BaseException as error:  # handed to the main thread below
                failures.append(error)
                trainer.aborted.set()

        # A copy: while a host starts, this process's own environment is that host's.
        trainer = Trainer(slices, settings, dict(os.environ) | driver, progress)
        threading.Thread(target=start_hosts, daemon=True).start()
        try:
            if lose_worker:
                first = trainer.start(
                    "train, lose a worker", total, FOLDER / "train-1.log", lose_worker_at=CHECKPOINT_PERIOD + 1
                )
                second = None
                # The newest checkpoint that the worker's end left behind.
                saved = [step for step in range(0, total, CHECKPOINT_PERIOD) if step <= CHECKPOINT_PERIOD]
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
        points = checks(run, first, second, saved, total)
        if not all(point.passed for point in points):
            slices.keep_logs(FOLDER / "ray-logs")
        peak.stop()
    passed = terminal.verdict(f"Rehearsal of {promised.model} on {promised.slice_text}", points)
    for start, log in ((first, "train-1.log"), (second, "train-2.log")):
        if start and start.returncode and start.error:
            terminal.error(f"{start.error} (all of it: {FOLDER.relative_to(ROOT) / log})")
    write_report(began, first, second, peak, points)
    return passed


class PeakMemory:
    """The most memory that the rehearsal's processes held together, sampled every 5 seconds."""

    def __init__(self) -> None:
        self.gib = 0.0
        self._done = threading.Event()

    def follow(self, slices: SimulatedSlices) -> None:
        """Start sampling in the background."""

        def sample() -> None:
            while not self._done.wait(5):
                total = psutil.Process().memory_info().rss
                for process in slices.processes():
                    try:
                        memory = process.memory_full_info()
                    except psutil.Error:
                        continue
                    # Shared pages count once where the system can tell.
                    total += getattr(memory, "pss", memory.rss)
                self.gib = max(self.gib, total / 2**30)

        threading.Thread(target=sample, daemon=True).start()

    def stop(self) -> None:
        """End the sampling."""
        self._done.set()


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
    parser.add_argument("--lose-worker", action="store_true", help="kill a worker mid-run, not a second start")
    arguments = parser.parse_args()
    # A polite kill cleans up like Ctrl-C, which a shell makes its background jobs ignore.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        return 0 if rehearse(arguments.lose_worker) else 1
    except (RehearsalError, SliceError, run_env.RunEnvError, FileNotFoundError) as error:
        terminal.error(str(error))
        return 1
    except KeyboardInterrupt:
        terminal.error("interrupted; everything that was started has been ended")
        return 130


if __name__ == "__main__":
    sys.exit(main())
