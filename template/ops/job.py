"""Start the unattended form of the run, the RayJob of k8s/job: its cluster is made for it and removed after it."""

import argparse
import shlex
import time
from typing import Any

from ops import kube, manifests, run_env, runs, terminal
from ops.cluster import dumped, prepare, refusal
from ops.kube import Kube
from ops.submit import check_overrides
from ops.terminal import UserError

# For all hosts to come, in hours. Flex-start may be granted within days; the rest, if it comes, comes soon.
WAIT_HOURS = {"flex-start": 7 * 24, "spot": 24, "reservation": 24, "on-demand": 12}
GONE_SECONDS = 300


def known_fields(cluster: Kube) -> dict[str, Any]:
    """Return the fields of a RayJob's spec that this cluster's KubeRay knows. Raises UserError without KubeRay."""
    definition = cluster.custom_resource("rayjobs.ray.io")
    if definition is None:
        raise UserError("the cluster does not know RayJobs: its Ray operator is off. make infra-cluster checks it")
    (version,) = [entry for entry in definition["spec"]["versions"] if entry["name"] == "v1"]
    return dict(version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])


def manifest(fields: dict[str, Any], queued: bool, wait_hours: float, overrides: list[str]) -> dict[str, Any]:
    """Return the RayJob to apply: with a token and a deadline for waiting, where this KubeRay knows them."""
    token = "authOptions" in fields["rayClusterSpec"]["properties"]
    folder = "job-queued" if queued else "job-token" if token else "job"
    (job,) = manifests.rendered(folder)
    job["spec"]["entrypoint"] = shlex.join([*manifests.entrypoint(), *overrides])
    # From KubeRay 1.6 on; an older one would refuse the field.
    if "preRunningDeadlineSeconds" in fields:
        job["spec"]["preRunningDeadlineSeconds"] = int(wait_hours * 3600)
    return job


def clear_the_way(cluster: Kube) -> None:
    """Remove the run's RayJob of an earlier time. Raises UserError while something of this run holds the hosts."""
    run = cluster.run
    if cluster.cluster():
        raise UserError(
            f"RayCluster {run.raycluster_name} holds the hosts that the job needs: "
            "make stop ARGS=--cluster, then make job"
        )
    job = cluster.job()
    if job is None:
        return
    runs.refuse_beside_a_job(cluster)
    cluster.delete("rayjobs", run.raycluster_name)
    deadline = time.monotonic() + GONE_SECONDS
    while cluster.job():
        if time.monotonic() > deadline:
            raise UserError(f"the earlier RayJob does not go away: kubectl describe rayjob --namespace={run.namespace}")
        time.sleep(1)


def main() -> int:
    """Apply the RayJob; 0 when the cluster has taken it."""
    parser = argparse.ArgumentParser(prog="make job", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="MaxText settings for this run")
    parser.add_argument("--queued", action="store_true", help="in the queue of k8s/queue, which Kueue keeps")
    parser.add_argument("--wait-hours", type=float, help="for all hosts to come (KubeRay 1.6 and later)")
    arguments = parser.parse_intermixed_args()
    check_overrides(arguments.overrides)
    run = run_env.load()
    cluster = kube.connect(run)
    wait_hours = WAIT_HOURS[run.capacity] if arguments.wait_hours is None else arguments.wait_hours
    if wait_hours <= 0:
        raise UserError(f"--wait-hours is {wait_hours:g}, but a wait takes longer than nothing: e.g. --wait-hours=6")
    clear_the_way(cluster)
    job = manifest(known_fields(cluster), arguments.queued, wait_hours, arguments.overrides)
    prepare(cluster)
    try:
        cluster.kubectl("apply", "--filename=-", given=dumped([job]))
    except UserError as problem:
        raise UserError(refusal(run, str(problem))) from None
    terminal.console.print(
        f"RayJob {run.raycluster_name} is asked for"
        + (", in the queue" if arguments.queued else "")
        + ". It needs no terminal: make status follows it, make stop ends it."
    )
    if "preRunningDeadlineSeconds" not in job["spec"]:
        terminal.notice(
            "this KubeRay, older than 1.6, has no deadline for the hosts to come: the job gives up only after "
            f"{job['spec']['activeDeadlineSeconds'] / 3600:g} hours"
        )
    return 0


if __name__ == "__main__":
    terminal.run(main)
