"""End the run; with --cluster also remove its RayCluster, with --node-pools also the TPU node pools, which bill."""

import argparse
import subprocess
import time

from ops import diagnosis, kube, ray_jobs, run_env, runs, terminal
from ops.kube import Kube
from ops.run_env import RunEnv
from ops.terminal import UserError

GCLOUD_SECONDS = 1800  # removing a node pool drains its nodes first
GONE_SECONDS = 600  # for pods to end: the hosts' grace periods, one after the other at worst


def stop_run(cluster: Kube) -> None:
    """End the run on the RayCluster, if one runs there. Raises UserError."""
    name = cluster.run.raycluster_name
    with runs.head(cluster, name) as jobs:
        job = jobs.running()
        if job is None:
            terminal.console.print("Nothing was running.")
            return
        with terminal.Progress() as progress:
            progress.update(f"stopping {ray_jobs.label(job)}")
            jobs.stop(job)
    terminal.console.print(f"{ray_jobs.label(job)} is stopped. make resume goes on from the newest checkpoint.")


def remove(cluster: Kube, plural: str, pods_of: str) -> bool:
    """Remove a Ray object and wait until its pods are gone; return whether there was one. Raises UserError."""
    if not cluster.delete(plural, cluster.run.raycluster_name):
        return False
    deadline = time.monotonic() + GONE_SECONDS
    with terminal.Progress() as progress:
        while True:
            there = cluster.job() if plural == "rayjobs" else cluster.cluster()
            left = [pod for pod in cluster.pods(pods_of) if not diagnosis.ended(pod)]
            if not there and not left:
                return True
            progress.update("removing", f"{len(left)} pods left")
            if time.monotonic() > deadline:
                raise UserError(
                    f"{len(left)} pods do not end within {GONE_SECONDS} s: "
                    f"kubectl get pods --namespace={cluster.run.namespace}"
                )
            time.sleep(2)


def remove_node_pools(run: RunEnv) -> None:
    """Remove the slices' node pools, the CPU pool not. Raises UserError with gcloud's own words."""
    pools = diagnosis.pool_names(run)
    if not pools:
        terminal.notice("Autopilot has no node pools of ours: it removes the hosts by itself")
    for pool in pools:
        terminal.console.print(f"removing node pool {pool}")
        where = [f"--cluster={run.cluster_name}", f"--project={run.project_id}", f"--location={run.cluster_location}"]
        listed = gcloud("container", "node-pools", "list", *where, f"--filter=name~^{pool}$", "--format=value(name)")
        if listed.strip():
            gcloud("container", "node-pools", "delete", pool, *where, "--quiet")


def gcloud(*arguments: str) -> str:
    """Run gcloud and return what it prints. Raises UserError with gcloud's own words."""
    what = f"gcloud {' '.join(arguments[:3])}"
    try:
        done = subprocess.run(
            ["gcloud", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GCLOUD_SECONDS
        )
    except FileNotFoundError:
        raise UserError("gcloud is not installed: cloud.google.com/sdk") from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{what} did not end within {GCLOUD_SECONDS // 60} min; Google Cloud may go on with it: run this again"
        ) from None
    if done.returncode:
        raise UserError(f"{what} failed: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    """Stop the run, and remove what was asked for; 0 when it is gone."""
    parser = argparse.ArgumentParser(prog="make stop", description=__doc__)
    parser.add_argument("--cluster", action="store_true", help="also remove the RayCluster: its hosts are free then")
    parser.add_argument(
        "--node-pools", action="store_true", help="also remove the TPU node pools (make infra-node-pools)"
    )
    arguments = parser.parse_args()
    run = run_env.load()
    cluster = kube.connect(run)
    job = cluster.job()
    if job:
        over = runs.is_over(job)
        remove(cluster, "rayjobs", str(runs.of_job(job).get("rayClusterName") or run.raycluster_name))
        terminal.console.print(
            f"RayJob {run.raycluster_name} {'was over and' if over else ''} is removed.".replace("  ", " ")
        )
    there = cluster.cluster()
    if there and not (arguments.cluster or arguments.node_pools):
        stop_run(cluster)
    elif there:
        remove(cluster, "rayclusters", run.raycluster_name)
        terminal.console.print(f"RayCluster {run.raycluster_name} is removed. make cluster makes it again.")
    elif not job:
        terminal.console.print(f"Nothing of the run is in namespace {run.namespace}.")
    if arguments.node_pools:
        remove_node_pools(run)
    left = [] if arguments.node_pools else [runs.bills(run)]
    if arguments.cluster and (run.cluster_mode == "autopilot" or run.capacity == "flex-start"):
        left = ["The TPU hosts end within minutes."]
    terminal.console.print(
        " ".join(
            [
                *left,
                f"The bucket gs://{run.bucket} and the cluster's CPU nodes bill on: make destroy removes the cluster.",
            ]
        )
    )
    return 0


if __name__ == "__main__":
    terminal.run(main)
