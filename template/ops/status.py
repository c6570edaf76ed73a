"""What the run is doing, as RayCluster or as RayJob: follow it while it runs, say how it ended when it is over."""

import argparse
import functools
import time

from ray.job_submission import JobStatus

from ops import diagnosis, kube, ray_jobs, run_env, runs, terminal
from ops.cluster import Wait, look, told
from ops.kube import Kube, Object, Unreachable
from ops.ray_jobs import Jobs
from ops.run_log import completed_step, mesh_devices
from ops.terminal import UserError

POLL_SECONDS = 5


class Moved(Exception):
    """The RayJob left the RayCluster that was followed."""


def summary(jobs: Jobs, submission_id: str, run: run_env.RunEnv) -> str:
    """Return the state of one run, with its last step, on one line."""
    details = jobs.details(submission_id)
    lines = jobs.log(submission_id).splitlines()
    steps = [step for step in map(completed_step, lines) if step]
    recent = [step.seconds for step in steps[-runs.RECENT_STEPS :]]
    devices = [count for count in map(mesh_devices, lines) if count] or [run.num_devices]
    total = runs.steps_of(details.entrypoint)
    last = runs.state(run, steps[-1], total, recent, devices[-1]) if steps else "no step yet"
    return f"{submission_id} {JobStatus(details.status).value.lower()}: {last}"


def of_cluster(cluster: Kube, once: bool) -> int:
    """Show the run on the run's own RayCluster; return its exit code, 0 for one that is shown once."""
    run = cluster.run
    seen = look(cluster, run.raycluster_name, None)
    if not diagnosis.complete(run, seen.pods):
        terminal.notice(f"RayCluster {run.raycluster_name}: {diagnosis.arrival(run, seen.pods)[1]}")
        reasons = diagnosis.explain(run, seen)
        if reasons:
            terminal.console.print(told(reasons), markup=False)
    with runs.head(cluster, run.raycluster_name) as jobs:
        job = jobs.running() or jobs.newest()
        if job is None:
            terminal.console.print(f"RayCluster {run.raycluster_name} waits for a run: make train. {runs.bills(run)}")
            return 0
        if job.submission_id is None:
            terminal.console.print(f"{ray_jobs.label(job)} runs, started on the head itself, not by make.")
            return 0
        if once:
            terminal.console.print(summary(jobs, job.submission_id, run))
            return 0
        return runs.follow(run, jobs, job.submission_id)


def of_job(cluster: Kube, job: Object, once: bool) -> int:
    """Show the RayJob; return 0 unless it failed."""
    run = cluster.run
    followed = ""
    while not runs.is_over(job):
        if once:
            show_once(cluster, job)
            return 0
        if runs_on_another(job, followed):
            followed = cluster_of(job)
            follow(cluster, followed, str(runs.of_job(job)["jobId"]))
        job = wait_for_change(cluster, job, followed)
    reason = diagnosis.of_job(run, job)
    if reason.lasting:
        terminal.error(f"{reason.what}. Next: {reason.next}")
        return 1
    terminal.console.print(f"{reason.what}. {reason.next}. {runs.bills(run)}")
    return 0


def cluster_of(job: Object) -> str:
    """Return the name of the RayCluster that the RayJob is on now, empty while there is none."""
    return str(runs.of_job(job).get("rayClusterName", ""))


def runs_on_another(job: Object, followed: str) -> bool:
    """True when the RayJob trains on a RayCluster other than `followed`, which has been followed to its end."""
    status = runs.of_job(job)
    return bool(
        status.get("jobDeploymentStatus") == "Running" and status.get("jobId") and cluster_of(job) not in ("", followed)
    )


def show_once(cluster: Kube, job: Object) -> None:
    """Print the state of a RayJob that is not over."""
    state = diagnosis.of_job(cluster.run, job).what
    if runs_on_another(job, ""):
        with runs.head(cluster, cluster_of(job)) as jobs:
            state = f"{state}: {summary(jobs, str(runs.of_job(job)['jobId']), cluster.run)}"
    elif cluster_of(job) and not job["spec"].get("suspend"):
        seen = look(cluster, cluster_of(job), None)
        state = f"{state}: {diagnosis.arrival(cluster.run, seen.pods)[1]}\n{told(diagnosis.explain(cluster.run, seen))}"
    terminal.console.print(state, markup=False)


def follow(cluster: Kube, name: str, submission_id: str) -> None:
    """Follow the RayJob's run on RayCluster `name` until it is over there: KubeRay decides what comes then."""
    try:
        with runs.head(cluster, name) as jobs:
            runs.follow(cluster.run, jobs, submission_id, functools.partial(refuse_moved, cluster, name))
    except Moved:
        terminal.notice(f"RayCluster {name} is gone")
    except UserError as problem:
        terminal.notice(f"RayCluster {name}: {problem}")


def wait_for_change(cluster: Kube, job: Object, followed: str) -> Object:
    """Wait, with progress, until the RayJob is over or trains on another RayCluster; return it as it is then."""
    wait: Wait | None = None
    with terminal.Progress() as progress:
        while not runs.is_over(job) and not runs_on_another(job, followed):
            name, state = cluster_of(job), ""
            if name and name != followed and not job["spec"].get("suspend"):
                wait = wait if wait and wait.name == name else Wait(cluster, name)
                try:
                    _, state = wait.step()
                except UserError as problem:  # waiting alone will not do, but KubeRay keeps the job
                    state = str(problem)
            progress.update(diagnosis.of_job(cluster.run, job).what, state)
            time.sleep(POLL_SECONDS)
            try:
                found = cluster.job()
            except Unreachable:
                continue
            if found is None:
                raise UserError(f"RayJob {job['metadata']['name']} was removed while it ran")
            job = found
    return job


def refuse_moved(cluster: Kube, name: str) -> None:
    """Raise Moved when the RayJob no longer runs on RayCluster `name`; called while its head does not answer."""
    try:
        job = cluster.job()
    except Unreachable:
        return
    status = runs.of_job(job)
    if job is None or runs.is_over(job) or status.get("rayClusterName") != name:
        raise Moved


def main() -> int:
    """Show what the run is doing; the exit code of one that is over is its own."""
    parser = argparse.ArgumentParser(prog="make status", description=__doc__)
    parser.add_argument("--once", action="store_true", help="show it once and end")
    arguments = parser.parse_args()
    run = run_env.load()
    cluster = kube.connect(run)
    job = cluster.job()
    if job and not runs.is_over(job):
        return of_job(cluster, job, arguments.once)
    if cluster.cluster():
        return of_cluster(cluster, arguments.once)
    if job:
        return of_job(cluster, job, arguments.once)
    terminal.console.print(f"Nothing runs in namespace {run.namespace}: make cluster and make train, or make job.")
    return 0


if __name__ == "__main__":
    terminal.run(main)
