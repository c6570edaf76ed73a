"""One start of train.py against the simulated slices: run, followed by its log, and never left running."""

import dataclasses
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from ops import terminal
from ops.run_env import ROOT
from ops.run_log import Step, completed_step, mesh_devices
from ops.simulated_slice import SimulatedSlices

# Ray Train says so every second where there is no dashboard, as here; on the cluster there is one.
NO_DASHBOARD = "State API may be temporarily unavailable"
SILENCE_SECONDS = 300  # a start that logs nothing for so long has hung


class RehearsalError(terminal.UserError):
    """The rehearsal cannot go on; the message says why and what to do."""


def committed_steps(folder: Path) -> list[int]:
    """Return the steps of the complete Orbax checkpoints in `folder`, ascending."""
    if not folder.is_dir():
        return []
    return sorted(
        int(entry.name)
        for entry in folder.iterdir()
        if entry.name.isdecimal() and (entry / "_CHECKPOINT_METADATA").is_file()
    )


@dataclasses.dataclass
class Attempt:
    """One time that the workers came up within a start."""

    devices: int  # in the mesh
    saved: list[int]  # steps whose checkpoints were committed before it
    steps: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Start:
    """One start of train.py and what its log showed."""

    returncode: int
    steps: list[Step]
    placed: set[tuple[str, str]]  # (slice name, worker id) of every Ray Train worker
    seconds: dict[str, float]  # when things happened first, since the start
    saved: list[int]  # steps whose checkpoints were committed when the workers last came up
    error: str
    attempts: list[Attempt] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happens to the run, once its log has come so far."""

    due: Callable[[Start], bool]
    happen: Callable[[], None]


class Trainer:
    """Runs train.py against the simulated slices, follows its log, and never leaves it running."""

    def __init__(
        self,
        slices: SimulatedSlices,
        settings: list[str],
        environment: dict[str, str],
        checkpoints: Path,
        progress: terminal.Progress,
    ) -> None:
        self.slices = slices
        self.checkpoints = checkpoints
        self.settings = settings
        self.environment = environment
        self.progress = progress
        self.aborted = threading.Event()  # set it to end a start early

    def start(
        self, phase: str, steps: int, log: Path, events: Sequence[Event] = (), seconds: float = math.inf
    ) -> Start:
        """Run train.py for `steps` steps and at most `seconds`; `events` happen one after the other, each when due.

        Raises RehearsalError when it is silent for SILENCE_SECONDS.
        """
        began = time.monotonic()
        result = Start(1, [], set(), {}, [], "")
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
                    if hung.is_set() or self.aborted.is_set() or time.monotonic() - began > seconds:
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
                    if events and events[0].due(result):
                        events[0].happen()
                        events = events[1:]
                result.returncode = process.wait()
            finally:
                process.kill()
        if result.returncode and time.monotonic() - began > seconds:
            result.error = f"train.py had not come so far after {seconds:g} s, and was ended"
        if hung.is_set():
            raise RehearsalError(f"train.py logged nothing for {SILENCE_SECONDS} s and was ended: see {log}")
        result.seconds["end"] = time.monotonic() - began
        return result

    def _read(self, line: str, result: Start, now: float, phase: str) -> None:
        if step := completed_step(line):
            result.seconds.setdefault("first step", now)
            result.steps.append(step)
            if result.attempts:
                result.attempts[-1].steps.append(step.step)
            self.progress.update(
                phase, f"step {step.step}  loss {step.loss:.3f}  {step.tokens_per_device:.0f} tokens/s/device"
            )
        elif found := re.search(r"host \d+: (\S+), TPU_WORKER_ID (\S+)", line):
            result.seconds.setdefault("worker", now)
            result.placed.add((found[1], found[2]))
            result.saved = committed_steps(self.checkpoints)
            self.progress.update(phase, "importing MaxText on every host")
        elif devices := mesh_devices(line):
            result.seconds.setdefault("mesh", now)
            result.attempts.append(Attempt(devices, result.saved))
            self.progress.update(phase, "compiling the step")
        elif "error: " in line or re.match(r"\S*(Error|Exception)\b", line.split("ip=")[-1].partition(") ")[2] or line):
            result.error = line.strip()

    def lose_worker(self) -> None:
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
