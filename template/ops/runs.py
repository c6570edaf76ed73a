"""What the commands about a run share: the way to its Ray head, a view that follows it, and how it ended."""

import contextlib
import re
import shlex
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from ray.job_submission import JobDetails, JobStatus

from ops import diagnosis, kube, manifests, ray_jobs, terminal
from ops.forward import Forward
from ops.kube import Kube, Object
from ops.ray_jobs import ANSWER_MINUTES, Jobs
from ops.run_env import ROOT, RunEnv
from ops.run_log import Step, completed_step, mesh_devices
from ops.terminal import UserError

LOGS = ROOT / "build" / "runs"
RECENT_STEPS = 20  # whose mean tells the time left
ENDED = ("Complete", "Failed", "ValidationFailed")  # of a RayJob
TAIL_LINES = 15  # shown of a run that failed
# What a person should see beside the progress line; everything is in the file.
NOTABLE = re.compile(r"error: |note: |waiting for |^Traceback|\b\w+(Error|Exception): |all \d+ steps are done")


@contextlib.contextmanager
def head(cluster: Kube, name: str, answer_minutes: float = ANSWER_MINUTES) -> Iterator[Jobs]:
    """The jobs at the head of RayCluster `name`, through a forwarded port. Raises UserError."""
    there = cluster.cluster(name)
    if there is None:
        raise UserError(f"there is no RayCluster {name} in namespace {cluster.run.namespace}: make cluster")
    token = cluster.token(there)
    if not any(
        diagnosis.is_ready(pod)
        for pod in cluster.pods(name)
        if pod["metadata"].get("labels", {}).get("ray.io/node-type") == "head"
    ):
        raise UserError(f"the head of RayCluster {name} is not ready: make cluster waits for it and says why")
    with Forward(cluster, name) as forward:
        yield Jobs(forward.address, token, answer_minutes)


def of_job(job: Object | None) -> Object:
    """Return the status of a RayJob, empty without one."""
    return dict((job or {}).get("status") or {})


def is_over(job: Object) -> bool:
    """True when the RayJob will not run again."""
    return of_job(job).get("jobDeploymentStatus") in ENDED


def current(cluster: Kube) -> str:
    """Return the name of the RayCluster that the run is on: the RayJob's while one runs, else the run's own."""
    job = cluster.job()
    if job and not is_over(job) and of_job(job).get("rayClusterName"):
        return str(of_job(job)["rayClusterName"])
    return cluster.run.raycluster_name


def refuse_beside_a_job(cluster: Kube) -> None:
    """Raise UserError while a RayJob of this run holds the hosts."""
    job = cluster.job()
    if job and not is_over(job):
        raise UserError(
            f"RayJob {job['metadata']['name']} runs and holds the hosts: make status follows it, make stop ends it"
        )


def refuse_old_image(there: Object) -> None:
    """Raise UserError when the RayCluster would run other code than the one at hand."""
    if kube.image_of(there) != manifests.tag():
        raise UserError(
            f"the cluster runs image {kube.image_of(there)}, the code in front of you is {manifests.tag()}: "
            "make image, make stop ARGS=--cluster, make cluster; or ARGS=--old-image to train the old code"
        )


def config() -> dict[str, Any]:
    """Return config/train.yml."""
    return dict(yaml.safe_load((ROOT / "config" / "train.yml").read_text(encoding="utf-8")))


def overrides_of(entrypoint: str) -> list[str]:
    """Return the key=value arguments of a run's entrypoint."""
    return [word for word in shlex.split(entrypoint) if re.match(r"\w+=", word)]


def steps_of(entrypoint: str) -> int:
    """Return how many steps a run was asked for."""
    asked = {"steps": config().get("steps", 0)} | dict(word.split("=", 1) for word in overrides_of(entrypoint))
    return int(asked["steps"])


def duration(seconds: float) -> str:
    """Return a time to wait in the units that matter."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes < 48 * 60 else f"{minutes / 1440:.1f} days"


def state(run: RunEnv, step: Step, total: int, recent: list[float], devices: int) -> str:
    """Return one step as the progress line has it. tokens/s is of the run's `devices`, MFU of the bf16 peak."""
    utilization = 100 * step.tflops_per_device / run.peak_tflops_per_device
    left = max(0, total - step.step - 1) * statistics.mean(recent)
    fewer = f"  {devices // run.devices_per_slice} of {run.num_slices} slices" if devices < run.num_devices else ""
    return (
        f"step {step.step + 1}/{total}  loss {step.loss:.3f}  "
        f"{step.tokens_per_device * devices:,.0f} tokens/s  MFU {utilization:.1f} %  {duration(left)} left{fewer}"
    )


class View:
    """Shows one run as it is read: the log in build/runs, a progress line, and the lines that matter."""

    def __init__(self, run: RunEnv, job: JobDetails, progress: terminal.Progress) -> None:
        self.run = run
        self.total = steps_of(job.entrypoint)
        self.name = str(job.submission_id)
        self.progress = progress
        self.step: Step | None = None
        self.devices = run.num_devices  # fewer while slices are lost
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        LOGS.mkdir(parents=True, exist_ok=True)
        self.path = LOGS / f"{self.name}.log"
        self._sink = self.path.open("w", encoding="utf-8", buffering=1)
        progress.update(f"{self.name} starts")

    def line(self, line: str) -> None:
        """Take the next line of the log."""
        self._sink.write(line + "\n")
        if step := completed_step(line):
            if self.step and step.step <= self.step.step:
                terminal.notice(f"restarted: goes on with step {step.step + 1} after step {self.step.step + 1}")
                self._recent.clear()
            self.step = step
            self._recent.append(step.seconds)
            self.progress.update(self.name, state(self.run, step, self.total, list(self._recent), self.devices))
            return
        self.devices = mesh_devices(line) or self.devices
        self.tail.append(line)
        if NOTABLE.search(line):
            terminal.console.print(line, markup=False)
        elif self.step is None and re.search(r"host \d+: \S+, TPU_WORKER_ID", line):
            self.progress.update(f"{self.name} starts", "importing MaxText")
        elif self.step is None and mesh_devices(line):
            self.progress.update(f"{self.name} starts", "compiling the step")

    def close(self) -> None:
        """The log is complete."""
        self._sink.close()


def follow(run: RunEnv, jobs: Jobs, submission_id: str, on_lost: Callable[[], None] = lambda: None) -> int:
    """Follow a run to its end, report how it ended, and return its own exit code. Ctrl-C leaves it going.

    `on_lost` is called while there is no connection, and may raise to end the wait.
    """
    job = jobs.details(submission_id)
    view = None
    try:
        with terminal.Progress() as progress:
            shown_view = view = View(run, job, progress)

            def lost() -> None:
                progress.update(f"{shown_view.name}: connection lost, the run goes on; connecting again")
                on_lost()

            details = jobs.follow(submission_id, view.line, lost)
    except KeyboardInterrupt:
        terminal.notice(f"{submission_id} goes on without you: make status follows it, make stop ends it")
        raise
    finally:
        if view:
            view.close()
    report(run, details, view)
    return ray_jobs.exit_code(details)


def report(run: RunEnv, details: JobDetails, view: View) -> None:
    """Print how a run ended, and what to do next."""
    log = shown(view.path)
    if JobStatus(details.status) == JobStatus.SUCCEEDED:
        terminal.console.print(f"{view.name} is done. make checkpoints lists what it saved. {bills(run)}")
    elif JobStatus(details.status) == JobStatus.STOPPED:
        terminal.notice(f"{view.name} was stopped. make resume goes on from the newest checkpoint.")
    else:
        for line in view.tail:
            terminal.console.print(f"  | {line}", markup=False)
        code = details.driver_exit_code
        terminal.error(
            f"{view.name} failed{f' with code {code}' if code else ''}. All of its log: {log}. "
            "make resume goes on from the newest checkpoint; make doctor looks at the hosts"
        )


def bills(run: RunEnv) -> str:
    """Return what bills while the RayCluster exists, and what frees it."""
    if run.cluster_mode == "autopilot" or run.capacity == "flex-start":
        return "The TPU hosts bill until make stop ARGS=--cluster."
    return "The TPU node pools bill whether or not anything runs on them: make stop ARGS=--node-pools removes them."


def shown(path: Path) -> str:
    """Return a path as people type it here."""
    return str(path.relative_to(ROOT))
