"""Pods, events and RayClusters as GKE, KubeRay and the TPU webhook write them."""

from typing import Any

Object = dict[str, Any]
NO_TPU_NODE = (
    "0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector. "
    "preemption: 0/4 nodes are available: 4 Preemption is not helpful for scheduling."
)


def worker(number: int = 0, slice_id: int = 0, ready: bool = False, **status: Any) -> Object:
    """A worker pod of group `slice` as KubeRay makes it and the TPU webhook completes it."""
    return {
        "metadata": {
            "name": f"my-tpu-run-slice-worker-{slice_id}{number}",
            "uid": f"uid-{slice_id}-{number}",
            "labels": {
                "ray.io/cluster": "my-tpu-run",
                "ray.io/node-type": "worker",
                "ray.io/group": "slice",
                "replicaIndex": f"slice-{slice_id}",
            },
        },
        "spec": {
            "nodeName": "",
            "containers": [
                {
                    "name": "ray-worker",
                    "image": "image:tag",
                    "env": [
                        {"name": "TPU_WORKER_ID", "value": str(number)},
                        {"name": "TPU_NAME", "value": f"slice-{slice_id}"},
                        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": {"name": "x", "key": "y"}}},
                    ],
                }
            ],
        },
        "status": {
            "phase": "Running" if ready else "Pending",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "podIP": f"10.0.{slice_id}.{number}",
            **status,
        },
    }


def head(ready: bool = True, **status: Any) -> Object:
    pod = worker(ready=ready, **status)
    pod["metadata"] |= {"name": "my-tpu-run-head", "uid": "uid-head"}
    pod["metadata"]["labels"] = {"ray.io/cluster": "my-tpu-run", "ray.io/node-type": "head"}
    pod["spec"]["containers"][0] |= {"name": "ray-head", "env": []}
    return pod


def event(thing: Object, reason: str, message: str, minute: int = 0, kind: str = "Pod") -> Object:
    return {
        "metadata": {
            "name": f"{thing['metadata']['name']}.17a",
            "creationTimestamp": f"2026-11-30T11:{minute:02d}:00Z",
        },
        "involvedObject": {"kind": kind, "name": thing["metadata"]["name"], "uid": thing["metadata"]["uid"]},
        "type": "Normal" if reason == "TriggeredScaleUp" else "Warning",
        "reason": reason,
        "message": message,
        "firstTimestamp": None,
        "lastTimestamp": f"2026-11-30T11:{minute:02d}:30Z",
    }


def raycluster(**status: Any) -> Object:
    return {
        "metadata": {"name": "my-tpu-run", "uid": "uid-cluster", "creationTimestamp": "2026-11-30T11:00:00Z"},
        "spec": {},
        "status": {"state": "", "conditions": [], "head": {}} | status,
    }


def unschedulable(message: str) -> Object:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"conditions": [condition]}


def waiting(reason: str, message: str = "", name: str = "ray-worker", **more: Any) -> Object:
    state = {"name": name, "image": "repo/trainer:abc", "state": {"waiting": {"reason": reason, "message": message}}}
    return {
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [state | {"lastState": {}, "restartCount": 0} | more],
    }
