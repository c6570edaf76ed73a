"""Make the RayCluster of k8s/cluster and wait until every host of every slice is there, or say why it is not."""

import argparse
import json
import secrets
import subprocess
import time
from typing import Any

from ops import diagnosis, kube, manifests, run_env, runs, terminal
from ops.diagnosis import Reason, Seen
from ops.kube import Kube, Unreachable
from ops.run_env import RunEnv
from ops.terminal import UserError

POLL_SECONDS = 5
# A lasting reason must hold for so long before the wait ends: objects come one after the other.
LASTING_SECONDS = 60
POOLS_SECONDS = 120  # between questions to gcloud about the node pools
WAIT_MINUTES = 60.0


def prepare(cluster: Kube) -> None:
    """Make namespace, service account, network policy and Ray's token, where they are not there."""
    cluster.kubectl("apply", "--filename=-", given=dumped(manifests.rendered("base")))
    (wanted,) = manifests.rendered("cluster")
    source = kube.token_source(wanted)
    if source and cluster.secret(*source) is None:
        name, key = source
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": cluster.run.namespace},
            "stringData": {key: secrets.token_hex(32)},
        }
        # Created, not applied: apply would keep the token in an annotation.
        cluster.kubectl("create", "--filename=-", given=dumped([secret]))


def apply(cluster: Kube) -> None:
    """Apply the RayCluster. Raises UserError when something is in its way, or the API server refuses it."""
    run = cluster.run
    there = cluster.cluster()
    if there and kube.image_of(there) != manifests.tag():
        raise UserError(
            f"RayCluster {run.raycluster_name} runs image {kube.image_of(there)}, the code in front of you is "
            f"{manifests.tag()}, and pods keep their image: make image, make stop ARGS=--cluster, then make cluster"
        )
    runs.refuse_beside_a_job(cluster)
    try:
        cluster.kubectl("apply", "--filename=-", given=dumped(manifests.rendered("cluster")))
    except UserError as problem:
        raise UserError(refusal(run, str(problem))) from None


def refusal(run: RunEnv, said: str) -> str:
    """Return what the API server's refusal means."""
    if "no matches for kind" in said or "resource mapping not found" in said:
        return "the cluster does not know RayClusters: its Ray operator is off. make infra-cluster checks it"
    reason = diagnosis.of_text(run, said)
    return f"{reason.what}. Next: {reason.next}" if reason else said


def dumped(objects: list[dict[str, Any]]) -> str:
    """Return `objects` as kubectl reads them."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})


def look(cluster: Kube, name: str, node_pools: list[dict[str, Any]] | None) -> Seen:
    """Read everything that tells why the hosts of RayCluster `name` do or do not come."""
    return Seen(
        cluster.cluster(name), cluster.pods(name), cluster.events(), node_pools, cluster.provisioning_requests()
    )


def node_pools(run: RunEnv) -> list[dict[str, Any]] | None:
    """Return the cluster's node pools as gcloud lists them; None where gcloud cannot tell, or Autopilot has none."""
    if run.cluster_mode == "autopilot":
        return None
    try:
        done = subprocess.run(
            ["gcloud", "container", "node-pools", "list", f"--cluster={run.cluster_name}",
             f"--project={run.project_id}", f"--location={run.cluster_location}", "--format=json"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return list(json.loads(done.stdout)) if done.returncode == 0 else None


class Wait:
    """Waits for the hosts of one RayCluster; remembers since when the same lasting reason holds."""

    def __init__(self, cluster: Kube, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.reasons: list[Reason] = []
        self.enough = False  # slices to train with were there at the last look
        self._lasting_since: float | None = None
        self._pools: list[dict[str, Any]] | None = None
        self._pools_read = float("-inf")

    def step(self) -> tuple[bool, str]:
        """Look once; return whether all hosts are there, and the state in a few words. Raises UserError."""
        now = time.monotonic()
        # Slow, and of use only while hosts are missing.
        if self.reasons and now - self._pools_read > POOLS_SECONDS:
            self._pools, self._pools_read = node_pools(self.cluster.run), now
        try:
            seen = look(self.cluster, self.name, self._pools)
        except Unreachable as problem:
            return False, str(problem)
        self.enough = diagnosis.enough(self.cluster.run, seen.pods)
        if diagnosis.complete(self.cluster.run, seen.pods):
            return True, diagnosis.arrival(self.cluster.run, seen.pods)[1]
        self.reasons = diagnosis.explain(self.cluster.run, seen)
        lasting = any(reason.lasting for reason in self.reasons)
        self._lasting_since = (self._lasting_since or now) if lasting else None
        if self._lasting_since is not None and now - self._lasting_since > LASTING_SECONDS:
            raise UserError(f"the hosts will not come by waiting:\n{told(self.reasons)}")
        state = diagnosis.arrival(self.cluster.run, seen.pods)[1]
        return False, f"{state}; {self.reasons[0].what}" if self.reasons else state

    def until_complete(self, minutes: float) -> None:
        """Wait with a progress line. Raises UserError, with every reason known, when waiting is of no use or over.

        An elastic run may start all the same: `enough` tells.
        """
        deadline = time.monotonic() + minutes * 60
        with terminal.Progress() as progress:
            while True:
                done, state = self.step()
                progress.update(f"hosts of {self.cluster.run.slice_text}", state)
                if done:
                    return
                if time.monotonic() > deadline:
                    raise UserError(
                        f"not all hosts came within {minutes:g} min ({state}). They are still asked for: make cluster "
                        f"waits on, make stop ARGS=--cluster gives up.\n{told(self.reasons)}"
                    )
                time.sleep(POLL_SECONDS)


def told(reasons: list[Reason]) -> str:
    """Return the reasons, each with its next step, on two lines each."""
    lines = [f"  - {reason.what}\n    next: {reason.next}" for reason in reasons]
    return "\n".join(lines) or "  Kubernetes says nothing in particular: make doctor looks at the whole chain"


def main() -> int:
    """Apply and wait; 0 when every host is there, or the time is over and enough of them are."""
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    parser.add_argument("--wait", type=float, default=WAIT_MINUTES, metavar="MINUTES", help="for the hosts")
    arguments = parser.parse_args()
    run = run_env.load()
    cluster = kube.connect(run)
    prepare(cluster)
    apply(cluster)
    wait = Wait(cluster, run.raycluster_name)
    try:
        wait.until_complete(arguments.wait)
    except UserError as problem:
        if not wait.enough:
            raise
        terminal.notice(str(problem))
        terminal.console.print(
            f"{run.min_slices} of {run.slice_text} are enough to train, and bill until: make stop ARGS=--cluster. "
            "Next: make train"
        )
        return 0
    except KeyboardInterrupt:
        terminal.notice("the cluster stays asked for: make cluster waits on, make stop ARGS=--cluster gives up")
        raise
    terminal.console.print(
        f"Every host of {run.slice_text} is there, and bills until: make stop ARGS=--cluster. Next: make train"
    )
    return 0


if __name__ == "__main__":
    terminal.run(main)
