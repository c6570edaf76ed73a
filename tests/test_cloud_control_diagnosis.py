"""Each reason why hosts do not come, told from objects as Kubernetes, GKE, KubeRay and gcloud write them."""

import importlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import pytest

from tests.cloud_objects import NO_TPU_NODE, Object, event, head, raycluster, unschedulable, waiting, worker
from tests.cloud_support import TEMPLATE, render, variant

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


@pytest.fixture(scope="module")
def diagnosis() -> Iterator[ModuleType]:
    """ops/diagnosis.py: standard library only, so that it also runs here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TEMPLATE / "template"))
        yield importlib.import_module("ops.diagnosis")
        for name in [name for name in sys.modules if name == "ops" or name.startswith("ops.")]:
            del sys.modules[name]


def run_of(**answers: str) -> Any:
    return sys.modules["ops.run_env"].load(render(**answers) / "run.env")


def explained(
    diagnosis: ModuleType, run: Any, pods: list[Object], events: list[Object] | None = None, **seen: Any
) -> Any:
    cluster = seen.pop("cluster", raycluster())
    return diagnosis.explain(run, diagnosis.Seen(cluster, pods, events or [], **seen), NOW)


# What the pods' status is, what events say about them, and what the reason must contain: text, next step, lasting.
POD_CONDITIONS: dict[str, tuple[Object, list[tuple[str, str]], str, str, bool]] = {
    "stockout": (
        unschedulable(NO_TPU_NODE),
        [
            (
                "FailedScaleUp",
                "Node scale up in zones us-east5-b associated with this pod failed: GCE out of resources. "
                "Pod is at risk of not being scheduled.",
            )
        ],
        "4 hosts: no capacity: Google Cloud has no v6e 4x4 as on-demand",
        "another zone or capacity",
        False,
    ),
    "scale-up in back-off": (
        unschedulable(NO_TPU_NODE),
        [("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 in backoff after failed scale-up")],
        "no capacity",
        "wait",
        False,
    ),
    "quota": (
        unschedulable(NO_TPU_NODE),
        [
            (
                "FailedScaleUp",
                "Node scale up in zones us-east5-b associated with this pod failed: GCE quota exceeded. "
                "Pod is at risk of not being scheduled.",
            )
        ],
        "quota: the project may not have so many chips",
        "console.cloud.google.com/iam-admin/quotas",
        True,
    ),
    "addresses": (
        unschedulable(NO_TPU_NODE),
        [("FailedScaleUp", "Node scale up in zones us-east5-b failed: IP space exhausted.")],
        "no addresses left",
        "multi-pod-cidr",
        True,
    ),
    "on their way": (
        unschedulable(NO_TPU_NODE),
        [
            (
                "FailedScaleUp",
                "Node scale up in zones us-east5-b associated with this pod failed: GCE out of resources.",
            ),
            ("TriggeredScaleUp", "pod triggered scale-up: [{https://www.googleapis.com/.../gke-v6e 0->4 (max: 4)}]"),
        ],
        "nodes were asked for and are on their way",
        "wait",
        False,
    ),
    "no such pool": (
        unschedulable(NO_TPU_NODE),
        [],
        "wrong or missing node pool: no node offers v6e 4x4 (tpu-v6e-slice), capacity on-demand",
        "make infra-node-pools",
        False,
    ),
    "no pool would help": (
        unschedulable(NO_TPU_NODE),
        [
            (
                "NotTriggerScaleUp",
                "pod didn't trigger scale-up (it wouldn't fit if a new node is added): "
                "2 node(s) didn't match Pod's node affinity/selector",
            )
        ],
        "wrong or missing node pool",
        "make infra-node-pools",
        True,
    ),
    "taint": (
        unschedulable("0/4 nodes are available: 4 node(s) had untolerated taint {cloud.google.com/gke-spot: true}."),
        [],
        "taint: every fitting node has one that the pods do not tolerate (cloud.google.com/gke-spot: true)",
        "capacity in the answers must be that of the node pools",
        True,
    ),
    "chips in use": (
        unschedulable(
            "0/5 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, "
            "4 Insufficient google.com/tpu."
        ),
        [],
        "the chips of the v6e 4x4 (tpu-v6e-slice) hosts are in use by other pods",
        "make stop",
        False,
    ),
    "requests too large": (
        unschedulable("0/4 nodes are available: 4 Insufficient memory."),
        [],
        "the v6e 4x4 (tpu-v6e-slice) hosts have too little of something left",
        "undo edits",
        True,
    ),
    "image not there": (
        waiting(
            "ImagePullBackOff",
            'Back-off pulling image "repo/trainer:abc": ErrImagePull: rpc error: code = NotFound desc = failed to pull '
            "and unpack image: repo/trainer:abc: not found",
        ),
        [],
        "image pull: repo/trainer:abc cannot be pulled",
        "make image",
        True,
    ),
    "image not for us": (
        waiting("ErrImagePull", "failed to authorize: failed to fetch oauth token: unexpected status: 403 Forbidden"),
        [],
        "image pull: repo/trainer:abc may not be read by the nodes",
        "make infra-registry",
        True,
    ),
    "mount denied": (
        waiting("ContainerCreating"),
        [
            (
                "FailedMount",
                'MountVolume.SetUp failed for volume "data" : rpc error: code = PermissionDenied desc = failed to get '
                'GCS bucket "acme-tpu-data": googleapi: Error 403: Caller does not have storage.objects.list access to '
                "the Google Cloud Storage bucket., forbidden",
            )
        ],
        "gcsfuse mount denied: ray/ray-train may not read gs://acme-tpu-data",
        "make infra-access",
        False,
    ),
    "mount without a bucket": (
        waiting("ContainerCreating"),
        [
            (
                "FailedMount",
                'MountVolume.SetUp failed for volume "data" : rpc error: code = NotFound desc = failed to get GCS '
                "bucket: storage: bucket doesn't exist",
            )
        ],
        "gcsfuse mount: there is no bucket gs://acme-tpu-data",
        "make infra-bucket infra-access",
        True,
    ),
    "mount without a sidecar": (
        waiting("ContainerCreating"),
        [
            (
                "FailedMount",
                'MountVolume.SetUp failed for volume "data" : rpc error: code = FailedPrecondition desc = failed to '
                "find the sidecar container in Pod spec",
            )
        ],
        "gcsfuse mount: its sidecar was not added",
        "gke-gcsfuse/volumes",
        True,
    ),
    "mount without a driver": (
        waiting("ContainerCreating"),
        [
            (
                "FailedMount",
                'MountVolume.MountDevice failed for volume "data" : driver name gcsfuse.csi.storage.gke.io not found '
                "in the list of registered CSI drivers",
            )
        ],
        "gcsfuse mount: the node has no gcsfuse driver",
        "make infra-cluster",
        False,
    ),
    "no token": (
        waiting("CreateContainerConfigError", 'secret "my-tpu-run-ray-token" not found'),
        [],
        "a secret is missing",
        "make cluster",
        True,
    ),
    "crash loop": (
        waiting(
            "CrashLoopBackOff",
            "back-off 2m40s restarting failed container",
            restartCount=5,
            lastState={"terminated": {"exitCode": 1, "reason": "Error"}},
        ),
        [],
        "crash loop: container ray-worker ended 5 times, last with code 1",
        "kubectl logs my-tpu-run-slice-worker-00 --container=ray-worker --previous",
        True,
    ),
    "out of memory": (
        waiting("CrashLoopBackOff", restartCount=2, lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
        [],
        "out of memory: container ray-worker needs more than its limit, 2 restarts",
        "grain_worker_count",
        True,
    ),
    "evicted": (
        {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."},
        [],
        "Evicted: The node was low on resource: ephemeral-storage.",
        "kubectl describe pod",
        False,
    ),
    "queued by Kueue": (
        {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]},
        [],
        "Kueue has not admitted it",
        "kubectl get workloads",
        False,
    ),
}


@pytest.mark.parametrize("name", POD_CONDITIONS)
def test_every_condition_of_a_pod_has_its_reason_and_next_step(name: str, diagnosis: ModuleType) -> None:
    status, messages, what, step, lasting = POD_CONDITIONS[name]
    pods = [head(), *(worker(number, **status) for number in range(4))]
    events = [
        event(pod, reason, message, minute) for pod in pods[1:] for minute, (reason, message) in enumerate(messages)
    ]
    (reason,) = explained(diagnosis, run_of(), pods, events)
    assert reason.what.startswith("4 hosts: ")
    assert what in reason.what
    assert step in reason.next
    assert reason.lasting == lasting


def test_an_event_of_an_earlier_pod_of_the_same_name_does_not_count(diagnosis: ModuleType) -> None:
    pod = worker(**unschedulable(NO_TPU_NODE))
    old = event(pod, "FailedScaleUp", "Node scale up failed: GCE quota exceeded.")
    old["involvedObject"]["uid"] = "another"
    (reason,) = explained(diagnosis, run_of(), [head(), pod], [old])
    assert "node pool" in reason.what


def test_a_reservation_that_is_full_is_named(diagnosis: ModuleType) -> None:
    run = run_of(generation="v5p", topology="4x4x4", capacity="reservation", reservation="block-a")
    pod = worker(**unschedulable(NO_TPU_NODE))
    (reason,) = explained(diagnosis, run, [head(), pod], [event(pod, "FailedScaleUp", "GCE out of resources")])
    assert "block-a" in reason.next


def test_flex_start_says_that_it_may_take_hours(diagnosis: ModuleType) -> None:
    pod = worker(**unschedulable(NO_TPU_NODE))
    (reason,) = explained(
        diagnosis,
        run_of(capacity="flex-start"),
        [head(), pod],
        [event(pod, "TriggeredScaleUp", "pod triggered scale-up")],
    )
    assert "flex-start may take hours" in reason.what


def test_a_head_without_room_is_told_apart_from_hosts(diagnosis: ModuleType) -> None:
    full = head(ready=False, **unschedulable("0/1 nodes are available: 1 Insufficient cpu."))
    (reason,) = explained(diagnosis, run_of(), [full])
    assert reason.what == "head: the CPU pool has no room for it"


def test_a_refusal_of_the_tpu_webhook_is_read_from_kuberays_events(diagnosis: ModuleType) -> None:
    cluster = raycluster()
    refused = event(
        cluster,
        "FailedToCreateWorkerPod",
        "Failed to create worker Pod for the cluster ray/my-tpu-run, admission webhook "
        '"kuberay-tpu-webhook.kuberay.io" denied the request: Number of workers in worker group not equal to '
        "specified topology",
        kind="RayCluster",
    )
    (reason,) = explained(diagnosis, run_of(), [head()], [refused], cluster=cluster)
    assert "a webhook refused it" in reason.what
    assert "not equal to specified topology" in reason.what
    assert reason.lasting


def test_a_webhook_that_does_not_answer_may_still_come(diagnosis: ModuleType) -> None:
    cluster = raycluster(
        conditions=[
            {
                "type": "ReplicaFailure",
                "status": "True",
                "reason": "FailedToCreateWorkerPod",
                "message": 'Internal error occurred: failed calling webhook "kuberay-tpu-webhook.kuberay.io": no '
                "endpoints available for service",
            }
        ]
    )
    (reason,) = explained(diagnosis, run_of(), [head()], cluster=cluster)
    assert "a webhook does not answer" in reason.what
    assert not reason.lasting


def test_a_missing_service_account_is_named(diagnosis: ModuleType) -> None:
    cluster = raycluster()
    failed = event(
        cluster,
        "FailedToCreateHeadPod",
        'Failed to create head Pod ray/my-tpu-run-head, pods "my-tpu-run-head" is forbidden: error looking up service '
        'account ray/ray-train: serviceaccount "ray-train" not found',
        kind="RayCluster",
    )
    (reason,) = explained(diagnosis, run_of(), [], [failed], cluster=cluster)
    assert reason.what == "service account ray-train does not exist in namespace ray"


def test_an_operator_that_does_nothing_is_noticed_after_a_minute(diagnosis: ModuleType) -> None:
    cluster = raycluster()
    cluster["status"] = {}
    (reason,) = explained(diagnosis, run_of(), [], cluster=cluster)
    assert "the Ray operator has not touched the RayCluster" in reason.what
    cluster["metadata"]["creationTimestamp"] = (NOW - timedelta(seconds=20)).isoformat()
    assert explained(diagnosis, run_of(), [], cluster=cluster) == []


def test_no_cluster_and_a_suspended_one(diagnosis: ModuleType) -> None:
    (reason,) = explained(diagnosis, run_of(), [], cluster=None)
    assert (reason.what, reason.next) == ("there is no RayCluster", "make cluster")
    cluster = raycluster()
    cluster["spec"]["suspend"] = True
    (reason,) = explained(diagnosis, run_of(), [], cluster=cluster)
    assert "suspended" in reason.what


POOL = "v6e-4x4-on-demand-0"


@pytest.mark.parametrize(
    ("pools", "what", "step"),
    [
        ([], f"node pool {POOL} is missing", "make infra-node-pools"),
        (
            [
                {
                    "name": POOL,
                    "status": "ERROR",
                    "conditions": [
                        {
                            "code": "GCE_STOCKOUT",
                            "canonicalCode": "RESOURCE_EXHAUSTED",
                            "message": "Google Compute Engine does not have enough resources available.",
                        }
                    ],
                }
            ],
            f"node pool {POOL} is in state ERROR: no capacity",
            "make infra-node-pools",
        ),
        (
            [
                {
                    "name": POOL,
                    "status": "ERROR",
                    "conditions": [{"code": "GCE_QUOTA_EXCEEDED", "message": "Quota 'TPUS_PER_TPU_FAMILY' exceeded."}],
                }
            ],
            f"node pool {POOL} is in state ERROR: quota",
            "console.cloud.google.com/iam-admin/quotas",
        ),
        ([{"name": POOL, "status": "PROVISIONING"}], f"node pool {POOL} is being made", "wait"),
    ],
)
def test_node_pools_are_read_as_gcloud_lists_them(
    pools: list[Object], what: str, step: str, diagnosis: ModuleType
) -> None:
    (reason,) = explained(diagnosis, run_of(), [], node_pools=pools)
    assert what in reason.what
    assert step in reason.next


def test_a_provisioning_request_that_failed_or_waits(diagnosis: ModuleType) -> None:
    request: Object = {
        "metadata": {"name": "ray-slice"},
        "status": {
            "conditions": [
                {"type": "Accepted", "status": "True"},
                {"type": "Failed", "status": "True", "reason": "OutOfResources", "message": "no available capacity"},
            ]
        },
    }
    (reason,) = explained(diagnosis, run_of(), [], provisioning_requests=[request])
    assert "ProvisioningRequest ray-slice is Failed: no capacity" in reason.what
    request["status"]["conditions"].pop()
    (reason,) = explained(diagnosis, run_of(), [], provisioning_requests=[request])
    assert reason.what == "ProvisioningRequest ray-slice waits for capacity"


def test_hosts_are_numbered_by_slice_and_worker_id(diagnosis: ModuleType) -> None:
    run_of()
    pods = [worker(number, slice_id, ready=True) for slice_id in (10, 9) for number in (1, 0)]
    assert [(host.slice_name, host.worker_id) for host in diagnosis.hosts(pods)] == [
        ("slice-9", "0"),
        ("slice-9", "1"),
        ("slice-10", "0"),
        ("slice-10", "1"),
    ]


def test_complete_only_when_every_host_of_every_slice_is_ready(diagnosis: ModuleType) -> None:
    run = run_of(topology="4x8", num_slices="2", capacity="spot")
    pods = [head(), *(worker(number, slice_id, ready=True) for slice_id in range(2) for number in range(8))]
    assert diagnosis.complete(run, pods)
    assert diagnosis.arrival(run, pods[:-1]) == (15, "head ready, 15 of 16 hosts, 1 of 2 slices")
    assert not diagnosis.complete(run, pods[:-1])
    assert not diagnosis.complete(run, pods[1:])


def test_enough_when_the_slices_are_whole_that_an_elastic_run_needs(diagnosis: ModuleType) -> None:
    answers = {"generation": "v5p", "topology": "2x2x2", "num_slices": "3"}
    pods = [head(), *(worker(number, slice_id, ready=True) for slice_id in range(3) for number in range(2))]
    elastic, rigid = run_of(**answers, min_slices="2"), run_of(**answers)
    assert diagnosis.enough(elastic, pods[:-1])
    text = "head ready, 5 of 6 hosts, 2 of 3 slices"
    assert diagnosis.arrival(elastic, pods[:-1]) == (5, f"{text}, 2 are enough to train")
    assert not diagnosis.complete(elastic, pods[:-1])
    assert not diagnosis.enough(elastic, pods[1:])
    assert not diagnosis.enough(elastic, [*pods[:2], *pods[3:5], *pods[6:]])
    assert not diagnosis.enough(rigid, pods[:-1])
    assert diagnosis.arrival(rigid, pods[:-1]) == (5, text)


def test_the_node_pools_are_those_that_the_scripts_make(diagnosis: ModuleType) -> None:
    for name in ("default", "v6e-two-slices-spot", "v5p-reservation"):
        run = sys.modules["ops.run_env"].load(variant(name) / "run.env")
        script = (variant(name) / "infra" / "lib.sh").read_text()
        assert 'pool_name() { printf \'%s-%s-%s-%s\' "$GENERATION" "$TOPOLOGY" "$CAPACITY" "$1"; }' in script
        assert diagnosis.pool_names(run) == [
            f"{run.generation}-{run.topology}-{run.capacity}-{number}" for number in range(run.num_slices)
        ]


@pytest.mark.parametrize(
    ("status", "what", "lasting"),
    [
        ({}, "waits for its hosts", False),
        ({"jobDeploymentStatus": "Initializing"}, "waits for its hosts", False),
        ({"jobDeploymentStatus": "Suspended"}, "waits in the queue", False),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, "runs", False),
        ({"jobDeploymentStatus": "Retrying", "failed": 2}, "started again after 2 failures", False),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, "is done", False),
        (
            {
                "jobDeploymentStatus": "Failed",
                "jobStatus": "FAILED",
                "reason": "AppFailed",
                "failed": 3,
                "message": "m",
            },
            "failed: the training failed, 3 times (m)",
            True,
        ),
        ({"jobDeploymentStatus": "Failed", "reason": "PreRunningDeadlineExceeded"}, "did not all come in time", True),
        ({"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded"}, "longer than activeDeadlineSeconds", True),
        ({"jobDeploymentStatus": "Failed", "reason": "SubmissionFailed"}, "could not start it on the head", True),
    ],
)
def test_what_became_of_a_rayjob(status: Object, what: str, lasting: bool, diagnosis: ModuleType) -> None:
    job = {"metadata": {"name": "my-tpu-run"}, "spec": {}, "status": status}
    reason = diagnosis.of_job(run_of(), job)
    assert what in reason.what
    assert reason.lasting == lasting
