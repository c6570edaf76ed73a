"""Why hosts do not come: reasons read from Kubernetes objects. Pure functions over what the API and gcloud return.

The wordings are those of the parts that write them: the scheduler, GKE's cluster autoscaler and node pools, the kubelet
with the gcsfuse driver, KubeRay, the TPU webhook and Kueue.
"""

import dataclasses
import re
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from ops.run_env import RunEnv

Object = dict[str, Any]
WORKER_GROUP = "slice"  # its name in k8s/cluster/raycluster.yaml
SILENT_OPERATOR_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Reason:
    """What keeps hosts away, and the next step. `lasting`: waiting alone does not mend it."""

    what: str
    next: str
    lasting: bool = False


@dataclasses.dataclass(frozen=True)
class Seen:
    """What was read at one moment; every object as JSON. node_pools is None where gcloud was not asked."""

    cluster: Object | None
    pods: list[Object] = dataclasses.field(default_factory=list)
    events: list[Object] = dataclasses.field(default_factory=list)
    node_pools: list[Object] | None = None
    provisioning_requests: list[Object] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Host:
    """One worker pod. The slice's name and the worker id are those that the TPU webhook gave it, empty without."""

    pod: str
    slice_name: str
    worker_id: str
    ready: bool
    ip: str
    node: str


def hosts(pods: list[Object]) -> list[Host]:
    """Return the TPU hosts among `pods` in the order of slice and worker id: their place is the host's number."""
    found = []
    for pod in pods:
        if pod["metadata"].get("labels", {}).get("ray.io/node-type") != "worker" or ended(pod):
            continue
        given = environment(pod)
        found.append(
            Host(
                pod["metadata"]["name"],
                given.get("TPU_NAME", ""),
                given.get("TPU_WORKER_ID", ""),
                is_ready(pod),
                pod.get("status", {}).get("podIP", ""),
                pod["spec"].get("nodeName", ""),
            )
        )
    return sorted(found, key=lambda host: (natural(host.slice_name), natural(host.worker_id), host.pod))


def natural(text: str) -> list[tuple[int, str]]:
    """Sort key by which slice-10 comes after slice-9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def environment(pod: Object) -> dict[str, str]:
    """Return the plain environment variables of the pod's first container."""
    return {entry["name"]: entry["value"] for entry in pod["spec"]["containers"][0].get("env", []) if "value" in entry}


def is_ready(pod: Object) -> bool:
    """True when the pod's containers run and its probes succeed."""
    if "deletionTimestamp" in pod["metadata"]:
        return False
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", []))


def ended(pod: Object) -> bool:
    """True for a pod that will not run again."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def arrival(run: RunEnv, pods: list[Object]) -> tuple[int, str]:
    """Return how many hosts are ready, and the state of head and slices in a few words."""
    head, count, whole = _ready(run, pods)
    text = (
        f"head {'ready' if head else 'not ready'}, {count} of {run.num_hosts} hosts, {whole} of {run.num_slices} slices"
    )
    if enough(run, pods) and not complete(run, pods):
        text += f", {run.min_slices} are enough to train"
    return count, text


def complete(run: RunEnv, pods: list[Object]) -> bool:
    """True when the head and every host of every slice are ready."""
    return _ready(run, pods) == (True, run.num_hosts, run.num_slices)


def enough(run: RunEnv, pods: list[Object]) -> bool:
    """True for an elastic run of which the head and every host of min_slices slices are ready."""
    head, _, whole = _ready(run, pods)
    return run.elastic and head and whole >= run.min_slices


def _ready(run: RunEnv, pods: list[Object]) -> tuple[bool, int, int]:
    """Return whether the head is ready, how many hosts are, and how many slices have all of theirs."""
    ready = Counter(host.slice_name for host in hosts(pods) if host.ready)
    head = any(is_ready(pod) for pod in pods if pod["metadata"].get("labels", {}).get("ray.io/node-type") == "head")
    return head, sum(ready.values()), sum(count >= run.hosts_per_slice for count in ready.values())


def explain(run: RunEnv, seen: Seen, now: datetime | None = None) -> list[Reason]:
    """Return why hosts are missing, lasting reasons first; empty when nothing in particular is known."""
    now = now or datetime.now(UTC)
    if seen.cluster is None:
        return [Reason("there is no RayCluster", "make cluster", True)]
    reasons = of_cluster(run, seen, now) + of_node_pools(run, seen.node_pools)
    for request in seen.provisioning_requests:
        reasons += of_provisioning_request(run, request)
    alike: dict[str, list[Reason]] = {}  # of the hosts: all of a slice tend to wait for the same
    for pod in seen.pods:
        reason = None if is_ready(pod) else of_pod(run, pod, events_of(seen.events, pod))
        if reason and pod["metadata"]["labels"].get("ray.io/node-type") == "head":
            reasons.append(dataclasses.replace(reason, what=f"head: {reason.what}"))
        elif reason:
            alike.setdefault(reason.what, []).append(reason)
    for what, same in alike.items():
        hosts_text = f"{len(same)} host{'s' if len(same) > 1 else ''}"
        reasons.append(dataclasses.replace(same[0], what=f"{hosts_text}: {what}"))
    return sorted(reasons, key=lambda reason: not reason.lasting)


def events_of(events: list[Object], thing: Object) -> list[Object]:
    """Return the events about one object, oldest first. An earlier object of the same name had another uid."""
    own = [
        event
        for event in events
        if event["involvedObject"].get("name") == thing["metadata"]["name"]
        and event["involvedObject"].get("uid", thing["metadata"].get("uid")) == thing["metadata"].get("uid")
    ]
    return sorted(own, key=last_seen)


def last_seen(event: Object) -> str:
    """Return when an event happened last; RFC 3339 times of one API sort as text."""
    times = [event.get("lastTimestamp"), (event.get("series") or {}).get("lastObservedTime"), event.get("eventTime")]
    return max(str(time or "") for time in [*times, event["metadata"].get("creationTimestamp")])


# --- the words of the parts, each with the reason; the first that matches counts ---


def of_text(run: RunEnv, text: str) -> Reason | None:
    """Return the reason that a message of GKE, a webhook or a driver gives, None when it is none of those known."""
    place = f"{run.generation} {run.topology} as {run.capacity} in {run.zone}"
    elsewhere = (
        "wait, or run make infra-node-pools again later, or take another zone or capacity: "
        "make reconfigure ARGS=capacity=..."
    )
    if run.capacity == "reservation":
        elsewhere = f"see what {run.reservation} has left: gcloud compute reservations list --project={run.project_id}"
    rules = [
        (
            r"QUOTA_EXCEEDED|quota exceeded|[Qq]uota '[^']+' exceeded|[Ii]nsufficient quota|exceeded quota",
            Reason(
                f"quota: the project may not have so many chips or so much of something else in {run.region} "
                f"({shortened(text)})",
                "raise it: console.cloud.google.com/iam-admin/quotas, service tpu.googleapis.com or "
                "compute.googleapis.com",
                True,
            ),
        ),
        (
            r"GCE_STOCKOUT|RESOURCE_POOL_EXHAUSTED|out of resources|does not have enough resources|"
            r"[Nn]o available capacity|in backoff after failed scale-up",
            Reason(
                f"no capacity: Google Cloud has no {place} just now",
                elsewhere,
            ),
        ),
        (
            r"IP_SPACE_EXHAUSTED|IP space exhausted|free IP space",
            Reason(
                "the cluster's subnet has no addresses left for nodes or pods",
                "add a pod range: cloud.google.com/kubernetes-engine/docs/how-to/multi-pod-cidr",
                True,
            ),
        ),
        (
            r"failed calling webhook",
            Reason(
                f"a webhook does not answer, so no pod can be made ({shortened(text)})",
                "make doctor; the TPU webhook belongs to the Ray operator: make infra-cluster checks it",
            ),
        ),
        (
            r"denied the request|admission webhook",
            Reason(
                f"a webhook refused it ({shortened(text)})",
                "the counts in k8s/cluster/raycluster.yaml must be those of the answers: undo edits there, or "
                "make update",
                True,
            ),
        ),
        (
            r"serviceaccount \"[^\"]*\" not found",
            Reason(
                f"service account {run.service_account} does not exist in namespace {run.namespace}",
                "make cluster",
                True,
            ),
        ),
        (
            r"failed to find the sidecar container|failed to get sidecar container",
            Reason(
                "gcsfuse mount: its sidecar was not added to the pod",
                "annotation gke-gcsfuse/volumes must be in k8s/cluster/raycluster.yaml, and the driver on: "
                "make infra-cluster checks it",
                True,
            ),
        ),
        (
            r"not found in the list of registered CSI drivers",
            Reason(
                "gcsfuse mount: the node has no gcsfuse driver (a new node needs a minute for it)",
                "make infra-cluster checks that the driver is on",
            ),
        ),
        (
            r"bucket does(n't| not) exist|code = NotFound.*bucket|notFound.*bucket",
            Reason(f"gcsfuse mount: there is no bucket gs://{run.bucket}", "make infra-bucket infra-access", True),
        ),
        (
            r"MountVolume.*(PermissionDenied|Unauthenticated|Error 40[13]|forbidden)|getAccessToken|"
            r"storage\.\w+\.\w+ access",
            Reason(
                f"gcsfuse mount denied: {run.namespace}/{run.service_account} may not read gs://{run.bucket}",
                "make infra-access (a new grant takes some minutes to count)",
            ),
        ),
        (
            r"secret \"([^\"]*)\" not found",
            Reason(f"a secret is missing ({shortened(text)})", "make cluster", True),
        ),
    ]
    for pattern, reason in rules:
        if re.search(pattern, text):
            return reason
    return None


def shortened(text: str, length: int = 220) -> str:
    """Return `text` on one line, cut to `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


# --- RayCluster ---


def of_cluster(run: RunEnv, seen: Seen, now: datetime) -> list[Reason]:
    """Return what the RayCluster itself, its events, and the operator's silence tell."""
    cluster = seen.cluster
    assert cluster is not None
    reasons = []
    status = cluster.get("status") or {}
    made = cluster["metadata"].get("creationTimestamp")
    if cluster["metadata"].get("deletionTimestamp"):
        return [Reason("the RayCluster is being removed", "wait, then make cluster")]
    if cluster["spec"].get("suspend") or condition(status, "RayClusterSuspended"):
        return [
            Reason(
                "the RayCluster is suspended, so no pod is made",
                f"where Kueue holds it: kubectl get workloads --namespace={run.namespace}",
            )
        ]
    if not status and not seen.pods and made and (now - moment(made)).total_seconds() > SILENT_OPERATOR_SECONDS:
        reasons.append(
            Reason(
                f"the Ray operator has not touched the RayCluster for {SILENT_OPERATOR_SECONDS} s",
                "make infra-cluster checks that the operator is on",
                True,
            )
        )
    messages = [event["message"] for event in events_of(seen.events, cluster) if event.get("type") == "Warning"][-5:]
    failure = condition(status, "ReplicaFailure")
    if failure:
        messages.append(failure.get("message", ""))
    if status.get("state") == "failed":
        messages.append(status.get("reason", ""))
    short = len(seen.pods) < run.num_hosts + 1  # a refusal counts only while pods are missing
    for message in messages if short else []:
        known = of_text(run, message)
        reasons.append(
            known
            or Reason(f"KubeRay: {shortened(message)}", f"kubectl describe raycluster --namespace={run.namespace}")
        )
    return list(dict.fromkeys(reasons))


def condition(status: Object, kind: str) -> Object | None:
    """Return the condition of type `kind` when it is true."""
    for entry in status.get("conditions") or []:
        if entry["type"] == kind and entry["status"] == "True":
            return dict(entry)
    return None


def moment(text: str) -> datetime:
    """Return a time of the API."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


# --- pods ---


def of_pod(run: RunEnv, pod: Object, events: list[Object]) -> Reason | None:
    """Return why one pod is not ready, None when nothing in particular is known."""
    status = pod.get("status", {})
    describe = f"kubectl describe pod {pod['metadata']['name']} --namespace={run.namespace}"
    if status.get("phase") == "Failed" and status.get("reason"):
        return Reason(f"{status['reason']}: {shortened(status.get('message', ''))}", describe)
    containers = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
    for container in containers:
        reason = of_container(run, pod, container)
        if reason:
            return reason
    scheduled = [c for c in status.get("conditions", []) if c["type"] == "PodScheduled"]
    if pod["spec"].get("schedulingGates") or (scheduled and scheduled[0].get("reason") == "SchedulingGated"):
        return Reason(
            "Kueue has not admitted it: other jobs hold the chips of the queue",
            f"kubectl get workloads --namespace={run.namespace}",
        )
    if scheduled and scheduled[0]["status"] == "False":
        return of_scheduling(run, pod, scheduled[0].get("message", ""), events)
    for event in reversed(events):
        if event["reason"] in ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"):
            return of_text(run, event["message"]) or Reason(shortened(event["message"]), describe)
    waiting = [c for c in status.get("initContainerStatuses", []) if c["name"] == "wait-gcs-ready"]
    if waiting and waiting[0].get("state", {}).get("running"):
        return Reason("it waits for the head to answer", "make logs ARGS=host=head, if it takes more than a minute")
    if any("running" in c.get("state", {}) for c in status.get("containerStatuses", [])):
        return Reason("Ray starts in it", f"{describe}, if it takes more than some minutes")
    if any(c.get("state", {}).get("waiting", {}).get("reason") == "ContainerCreating" for c in containers):
        return Reason("its image is pulled and its volumes mounted", f"{describe}, if it takes more than some minutes")
    return None


def of_container(run: RunEnv, pod: Object, container: Object) -> Reason | None:
    """Return why one container does not run."""
    name = pod["metadata"]["name"]
    waiting = container.get("state", {}).get("waiting") or {}
    why, said = waiting.get("reason", ""), waiting.get("message", "")
    if why in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
        # The back-off's own message says only that it backs off.
        image = container.get("image") or "the image"
        denied = re.search(r"403|[Dd]enied|[Uu]nauthori[sz]ed", said)
        return Reason(
            f"image pull: {image} {'may not be read by the nodes' if denied else 'cannot be pulled'}"
            + (f" ({shortened(said)})" if said else ""),
            "make infra-registry" if denied else "make image, then make cluster",
            True,
        )
    if why in ("CreateContainerConfigError", "CreateContainerError"):
        return of_text(run, said) or Reason(f"{why}: {shortened(said)}", f"kubectl describe pod {name}", True)
    last = container.get("lastState", {}).get("terminated") or container.get("state", {}).get("terminated") or {}
    restarts = container.get("restartCount", 0)
    if last.get("reason") == "OOMKilled":
        return Reason(
            f"out of memory: container {container['name']} needs more than its limit, {restarts} restarts",
            "fewer host-side workers (grain_worker_count in config/train.yml), or a larger limit in "
            "k8s/cluster/raycluster.yaml",
            True,
        )
    if why == "CrashLoopBackOff" or (restarts > 1 and last.get("exitCode")):
        return Reason(
            f"crash loop: container {container['name']} ended {restarts} times, last with code {last.get('exitCode')}",
            f"kubectl logs {name} --container={container['name']} --previous --namespace={run.namespace}",
            True,
        )
    return None


def of_scheduling(run: RunEnv, pod: Object, message: str, events: list[Object]) -> Reason:
    """Return why no node takes a pod: what the autoscaler said last counts more than the scheduler's list."""
    head = pod["metadata"]["labels"].get("ray.io/node-type") == "head"
    scaling = [e for e in events if e["reason"] in ("FailedScaleUp", "NotTriggerScaleUp", "TriggeredScaleUp")]
    last = scaling[-1] if scaling else {"reason": "", "message": ""}
    if last["reason"] == "TriggeredScaleUp":
        return Reason(
            "nodes were asked for and are on their way"
            + (" (flex-start may take hours)" if run.capacity == "flex-start" else ""),
            "wait",
        )
    known = of_text(run, last["message"]) if last["reason"] in ("FailedScaleUp", "NotTriggerScaleUp") else None
    if known:
        return known
    if last["reason"] == "FailedScaleUp":
        return Reason(f"no capacity: {shortened(last['message'])}", "wait, or another zone or capacity")
    pool = f"{run.generation} {run.topology} ({run.gke_accelerator})"
    if head and "Insufficient" in message:
        return Reason(
            "the CPU pool has no room for it",
            f"kubectl describe nodes --selector=cloud.google.com/gke-nodepool=default-pool ({shortened(message)})",
        )
    if "Insufficient google.com/tpu" in message:
        return Reason(
            f"the chips of the {pool} hosts are in use by other pods",
            "kubectl get pods --all-namespaces --field-selector=status.phase=Running; make stop frees this run's",
        )
    if "Insufficient" in message:
        return Reason(
            f"the {pool} hosts have too little of something left ({shortened(message)})",
            "the requests in k8s/cluster/raycluster.yaml must fit the machine: undo edits there",
            True,
        )
    selector = "node(s) didn't match Pod's node affinity/selector"
    taints = [t for t in re.findall(r"untolerated taint \{([^}]*)\}", message) if not t.startswith("google.com/tpu")]
    if taints and not re.search(r"(^|[ ,])\d+ " + re.escape(selector), message):
        return Reason(
            f"taint: every fitting node has one that the pods do not tolerate ({', '.join(sorted(set(taints)))})",
            "capacity in the answers must be that of the node pools: make infra-node-pools makes them",
            True,
        )
    if selector in message and run.cluster_mode == "standard":
        if head:
            return Reason("there is no CPU pool 'default-pool' for it", "make infra-cluster", True)
        return Reason(
            f"wrong or missing node pool: no node offers {pool}, capacity {run.capacity}"
            + (f", with the taints {', '.join(sorted(set(taints)))} besides" if taints else ""),
            "make infra-node-pools",
            last["reason"] == "NotTriggerScaleUp",
        )
    return Reason(f"no node takes it yet ({shortened(message)})", "wait; make infra-node-pools makes what is missing")


# --- what the TPU webhook gives ---


def of_environment(run: RunEnv, pods: list[Object]) -> list[Reason]:
    """Return what is wrong with the environment that the TPU webhook gives the hosts: libtpu and Ray read it."""
    missing: dict[str, int] = {}
    by_slice: dict[str, list[str]] = {}
    problems = []
    there = [pod for pod in pods if pod["metadata"]["labels"].get("ray.io/node-type") == "worker" and not ended(pod)]
    wanted = ["TPU_WORKER_ID", "TPU_NAME"] + (["TPU_WORKER_HOSTNAMES"] if run.hosts_per_slice > 1 else [])
    next_step = "make infra-cluster checks the Ray operator, which brings the webhook; then make stop ARGS=--cluster"
    for pod in there:
        given = environment(pod)
        for name in wanted:
            if not given.get(name):
                missing[name] = missing.get(name, 0) + 1
        by_slice.setdefault(given.get("TPU_NAME", ""), []).append(given.get("TPU_WORKER_ID", ""))
        named = len(given.get("TPU_WORKER_HOSTNAMES", "").split(","))
        if "TPU_WORKER_HOSTNAMES" in wanted and given.get("TPU_WORKER_HOSTNAMES") and named != run.hosts_per_slice:
            problems.append(
                Reason(
                    f"{pod['metadata']['name']} knows {named} hosts in TPU_WORKER_HOSTNAMES, its slice has "
                    f"{run.hosts_per_slice}",
                    next_step,
                    True,
                )
            )
    if not there:
        return [Reason("no host has a pod", "make cluster", True)]
    for name, count in missing.items():
        problems.append(
            Reason(f"{count} of {len(there)} hosts lack {name}: the TPU webhook did not see them", next_step, True)
        )
    for name, numbers in sorted(by_slice.items()):
        twice = sorted({number for number in numbers if number and numbers.count(number) > 1}, key=natural)
        if twice and name:
            problems.append(
                Reason(f"slice {name} has TPU_WORKER_ID {', '.join(twice)} more than once", next_step, True)
            )
    return problems


# --- node pools and requests for capacity ---


def pool_names(run: RunEnv) -> list[str]:
    """Return the node pools of the slices, as infra/lib.sh names them; none on Autopilot."""
    if run.cluster_mode == "autopilot":
        return []
    return [f"{run.generation}-{run.topology}-{run.capacity}-{slice_id}" for slice_id in range(run.num_slices)]


def of_node_pools(run: RunEnv, pools: list[Object] | None) -> list[Reason]:
    """Return what keeps the slices' node pools from being there; `pools` as `gcloud ... list --format=json` has it."""
    if pools is None:
        return []
    known = {pool["name"]: pool for pool in pools}
    reasons = []
    for name in pool_names(run):
        pool = known.get(name)
        if pool is None:
            reasons.append(Reason(f"node pool {name} is missing", "make infra-node-pools", True))
            continue
        said = " ".join(
            f"{entry.get('code', '')} {entry.get('canonicalCode', '')} {entry.get('message', '')}"
            for entry in pool.get("conditions", [])
        )
        text = f"{said} {pool.get('statusMessage', '')}".strip()
        if pool.get("status") in ("ERROR", "RUNNING_WITH_ERROR"):
            found = of_text(run, text) or Reason(shortened(text), "make infra-node-pools makes it again")
            reasons.append(
                dataclasses.replace(found, what=f"node pool {name} is in state {pool['status']}: {found.what}")
            )
        elif pool.get("status") == "PROVISIONING":
            reasons.append(Reason(f"node pool {name} is being made", "wait"))
    return reasons


def of_provisioning_request(run: RunEnv, request: Object) -> list[Reason]:
    """Return what a ProvisioningRequest (queued capacity, as Kueue asks for it) waits for or failed with."""
    name = request["metadata"]["name"]
    status = request.get("status") or {}
    for kind in ("Failed", "CapacityRevoked", "BookingExpired"):
        found = condition(status, kind)
        if found:
            text = f"{found.get('reason', '')} {found.get('message', '')}"
            known = of_text(run, text)
            what = known.what if known else shortened(text)
            return [
                Reason(
                    f"ProvisioningRequest {name} is {kind}: {what}",
                    known.next if known else "make stop, then start again",
                    True,
                )
            ]
    if not condition(status, "Provisioned"):
        return [Reason(f"ProvisioningRequest {name} waits for capacity", "wait")]
    return []


# --- RayJob ---


def of_job(run: RunEnv, job: Object) -> Reason:
    """Return how a RayJob that is over ended, or what it is about."""
    status = job.get("status") or {}
    name = job["metadata"]["name"]
    state = status.get("jobDeploymentStatus", "")
    message = shortened(status.get("message", ""))
    failed = status.get("failed") or 0
    again = "make job starts it again, from the newest checkpoint"
    if status.get("jobStatus") == "SUCCEEDED":
        return Reason(f"RayJob {name} is done", "make checkpoints lists what it saved")
    if job["spec"].get("suspend") or state in ("Suspended", "Suspending"):
        return Reason(f"RayJob {name} waits in the queue", f"kubectl get workloads --namespace={run.namespace}")
    if state in ("", "Initializing", "Waiting"):
        return Reason(f"RayJob {name} waits for its hosts", "make status says why, if it takes long")
    if state == "Retrying":
        return Reason(f"RayJob {name} is started again after {failed} failures", "make status")
    if state == "Running":
        return Reason(f"RayJob {name} runs", "make status")
    more_time = f"make job ARGS=--wait-hours=..., or another capacity; {again}"
    describe = f"kubectl describe job {name} --namespace={run.namespace}"
    why = {
        "PreRunningDeadlineExceeded": ("its hosts did not all come in time", more_time),
        "DeadlineExceeded": ("it took longer than activeDeadlineSeconds in k8s/job/rayjob.yaml", again),
        "SubmissionFailed": ("its submitter could not start it on the head", describe),
        "AppFailed": (f"the training failed, {failed} times", f"make logs; {again}"),
        "ValidationFailed": ("KubeRay does not take it", "undo edits in k8s/"),
        "JobDeploymentStatusTransitionGracePeriodExceeded": ("its head stopped answering", again),
    }
    what, next_step = why.get(status.get("reason", ""), ("", again))
    return Reason(
        f"RayJob {name} failed: {' '.join(filter(None, [what, f'({message})' if message else '']))}", next_step, True
    )
