"""Print the log of the run, or of one host: what Ray's workers wrote there, and its container."""

import argparse
import re

from ops import diagnosis, kube, manifests, ray_jobs, run_env, runs, terminal
from ops.kube import Kube
from ops.terminal import UserError

LINES = 200  # of each file of a host


def of_run(cluster: Kube) -> str:
    """Return the log of the newest run. Raises UserError with where to look when its cluster is gone."""
    name = runs.current(cluster)
    if cluster.cluster(name) is None:
        kept = sorted(runs.LOGS.glob("*.log"), key=lambda path: path.stat().st_mtime) if runs.LOGS.is_dir() else []
        raise UserError(
            f"there is no RayCluster {name} any more. "
            + (f"What was followed from here: {runs.shown(kept[-1])}. " if kept else "")
            + f"All of it: gcloud logging read 'resource.type=k8s_container AND "
            f"resource.labels.namespace_name={cluster.run.namespace} AND resource.labels.pod_name:{name}' "
            f"--project={cluster.run.project_id} --freshness=1d"
        )
    with runs.head(cluster, name) as jobs:
        job = jobs.newest()
        if job is None or job.submission_id is None:
            raise UserError("no run was submitted to this cluster yet: make train")
        return jobs.log(job.submission_id)


def of_host(cluster: Kube, wanted: str) -> str:
    """Return the logs of host number `wanted`, or of the head. Raises UserError naming the hosts there are."""
    name = runs.current(cluster)
    pods = cluster.pods(name)
    hosts = diagnosis.hosts(pods)
    if wanted == "head":
        heads = [p for p in pods if p["metadata"]["labels"].get("ray.io/node-type") == "head"]
        if not heads:
            raise UserError("the head has no pod: make cluster says why")
        return container_log(cluster, heads[0]["metadata"]["name"], container_of("head"))
    if not wanted.isdecimal() or int(wanted) >= len(hosts):
        there = "\n".join(
            f"  {number}  {host.pod}  {host.slice_name} worker {host.worker_id}{'' if host.ready else ', not ready'}"
            for number, host in enumerate(hosts)
        )
        raise UserError(
            f"host={wanted} is none of the {len(hosts)} hosts that have a pod, nor host=head\n{there}".rstrip()
        )
    host = hosts[int(wanted)]
    title = f"host {wanted}: {host.slice_name} worker {host.worker_id}, pod {host.pod}, node {host.node}\n"
    parts = [title, container_log(cluster, host.pod, container_of("worker"))]
    try:
        with runs.head(cluster, name) as jobs:
            job = jobs.newest()
            if job and job.job_id:
                parts.append(jobs.host_log(host.ip, job.job_id, LINES))
    except (UserError, ray_jobs.Lost) as problem:
        parts.append(f"(no worker log: {problem})")
    return "\n".join(parts)


def container_of(kind: str) -> str:
    """Return the name of the Ray container of a head or worker pod."""
    (cluster,) = manifests.rendered("cluster")
    spec = cluster["spec"]
    group = spec["headGroupSpec"] if kind == "head" else spec["workerGroupSpecs"][0]
    return str(group["template"]["spec"]["containers"][0]["name"])


def container_log(cluster: Kube, pod: str, container: str) -> str:
    """Return what a container printed, and before that what it printed before its last restart, if it had one."""
    arguments = ["logs", pod, f"--container={container}", f"--tail={LINES}"]
    parts = []
    for more in (["--previous"], []):
        try:
            parts.append(cluster.kubectl(*arguments, *more))
        except UserError as problem:
            if not more:
                parts.append(f"(no container log: {problem})")
    return "\n".join(parts)


def main() -> int:
    """Print the log; 0 when there is one."""
    parser = argparse.ArgumentParser(prog="make logs", description=__doc__)
    parser.add_argument("which", nargs="?", default="", metavar="host=N", help="a host's number from 0, or host=head")
    arguments = parser.parse_args()
    if arguments.which and not re.fullmatch(r"host=\w+", arguments.which):
        raise UserError(
            f"'{arguments.which}' names no host: give ARGS=host=2 or ARGS=host=head, or nothing for the run"
        )
    cluster = kube.connect(run_env.load())
    wanted = arguments.which.partition("=")[2]
    print(of_host(cluster, wanted) if wanted else of_run(cluster))
    return 0


if __name__ == "__main__":
    terminal.run(main)
