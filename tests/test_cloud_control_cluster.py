"""make cluster, train, job, status, logs, dashboard, stop and doctor against a real API server and a real Ray head.

No operator and no kubelet run here: the test writes the pods and events that KubeRay and GKE would write. What only a
kubelet can do, forwarding a port, a stand-in for `kubectl port-forward` does; every other kubectl is the real one.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.cloud_objects import NO_TPU_NODE, Object, head, unschedulable, worker
from tests.cloud_ray import PROGRAM, RayHead, Way
from tests.conftest import ROOT, Render
from tests.control_plane import PROGRAMS, ControlPlane

pytestmark = pytest.mark.cluster

NAME = "my-tpu-run"
NAMESPACES = (f"control-{number}" for number in itertools.count())
KUBECTL = """#!{python} -S
import os, signal, sys
if "port-forward" not in sys.argv:
    os.execv({kubectl!r}, [{kubectl!r}, *sys.argv[1:]])
local, _, remote = sys.argv[-1].partition(":")
assert remote == "8265", sys.argv
sys.path.insert(0, {root!r})
from tests.cloud_ray import Way
way = Way({port}, int(local or 0))
print(f"Forwarding from 127.0.0.1:{{way.port}} -> 8265", flush=True)
open({record!r}, "a").write(f"{{os.getpid()}}\\n")
signal.pause()
"""


class Site:
    """A generated repository, a namespace of its own in the API server, and the way in which make runs a command."""

    def __init__(self, api: ControlPlane, folder: Path, namespace: str, python: Path, scratch: Path) -> None:
        self.api, self.folder, self.namespace, self.python, self.scratch = api, folder, namespace, python, scratch
        self.forwards = scratch / "forwards"
        self.stand_in(9)
        api.ensure_namespace(namespace)

    def stand_in(self, port: int) -> None:
        """Put a kubectl on PATH that forwards to `port` of this machine."""
        binary = self.scratch / "bin" / "kubectl"
        binary.parent.mkdir(exist_ok=True)
        binary.write_text(
            KUBECTL.format(
                python=sys.executable,
                kubectl=str(PROGRAMS / "kubectl"),
                record=str(self.forwards),
                port=port,
                root=str(ROOT),
            )
        )
        binary.chmod(0o755)

    def start(self, module: str, *arguments: str, **constants: object) -> "subprocess.Popen[str]":
        """Start `python -m ops.<module>`, with constants of it changed."""
        code = [f"from ops import {module}, terminal", "import sys", f"sys.argv = {['make', *arguments]!r}"]
        code += [f"{module}.{name} = {value!r}" for name, value in constants.items()]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return subprocess.Popen(
            [self.python, "-c", "\n".join([*code, f"terminal.run({module}.main)"])],
            cwd=self.folder,
            env=environment
            | {
                "KUBECONFIG": str(self.api.kubeconfig),
                "KUBE_CONTEXT": "test",
                "PATH": f"{self.scratch / 'bin'}:{os.environ['PATH']}",
                "COLUMNS": "200",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, module: str, *arguments: str, **constants: object) -> tuple[int, str]:
        """Run a command to its end."""
        return ended(self.start(module, *arguments, **constants))

    def path(self, kind: str) -> str:
        return f"/apis/ray.io/v1/namespaces/{self.namespace}/{kind}"

    def get(self, kind: str, name: str = NAME) -> Object:
        return dict(self.api.request("GET", f"{self.path(kind)}/{name}"))

    def await_object(self, kind: str, name: str = NAME) -> Object:
        """Wait until a command has made a Ray object."""
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(Exception):
                return self.get(kind, name)
            assert time.monotonic() < deadline, f"no {kind} {name}"
            time.sleep(0.2)

    def set_status(self, kind: str, status: Object) -> None:
        """Write the status of a Ray object, as its operator does."""
        found = self.get(kind)
        self.api.request("PUT", f"{self.path(kind)}/{NAME}/status", found | {"status": status})

    def pod(self, pod: Object, cluster: str = NAME) -> Object:
        """Make a pod with its status, or write its status anew."""
        pod = json.loads(json.dumps(pod)) | {"apiVersion": "v1", "kind": "Pod"}
        status = pod.pop("status")
        pod["metadata"] |= {"namespace": self.namespace}
        pod["metadata"].pop("uid")
        pod["metadata"]["labels"]["ray.io/cluster"] = cluster
        pod["spec"].pop("nodeName")
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        try:
            made = self.api.request("GET", f"{path}/{pod['metadata']['name']}")
        except Exception:
            made = self.api.create(pod)
        answer = self.api.request("PUT", f"{path}/{pod['metadata']['name']}/status", made | {"status": status})
        return dict(answer)

    def event(self, pod: Object, reason: str, message: str) -> None:
        """Write an event about a pod."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        reference = {"kind": "Pod", "name": pod["metadata"]["name"], "namespace": self.namespace}
        self.api.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"generateName": f"{pod['metadata']['name']}.", "namespace": self.namespace},
                "involvedObject": reference | {"uid": pod["metadata"]["uid"]},
                "type": "Warning",
                "reason": reason,
                "message": message,
                "source": {"component": "cluster-autoscaler"},
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            }
        )

    def all_ready(self) -> None:
        """Make head and hosts ready."""
        self.pod(head())
        for number in range(4):
            self.pod(worker(number, ready=True))


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    printed, _ = process.communicate(timeout=400)
    assert "Traceback" not in printed, printed
    return process.returncode, printed


@pytest.fixture
def site(api_server: ControlPlane, render: Render, run_python: Path, tmp_path: Path) -> Site:
    namespace = next(NAMESPACES)
    folder = render(project_id="acme-tpu", bucket="acme-tpu-data", run_name="pilot", namespace=namespace)
    return Site(api_server, folder, namespace, run_python, tmp_path)


def test_make_cluster_waits_for_every_host_and_makes_the_token_once(site: Site) -> None:
    process = site.start("cluster", POLL_SECONDS=0.5)
    cluster = site.await_object("rayclusters")
    site.pod(head())
    for number in range(3):
        site.pod(worker(number, ready=True))
    waiting = site.pod(worker(3, **unschedulable(NO_TPU_NODE)))
    site.event(waiting, "TriggeredScaleUp", "pod triggered scale-up: [{gke-v6e 0->4 (max: 4)}]")
    time.sleep(2)
    assert process.poll() is None
    site.pod(worker(3, ready=True))
    code, printed = ended(process)
    assert code == 0, printed
    assert "Every host of 1 x v6e 4x4 is there" in printed

    tag = subprocess.check_output([sys.executable, "-m", "ops.image_tag"], cwd=site.folder, text=True).strip()
    assert cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"].endswith(f":{tag}")
    secret = f"/api/v1/namespaces/{site.namespace}/secrets/{NAME}-ray-token"
    first = site.api.request("GET", secret)["data"]["auth_token"]
    assert site.run("cluster")[0] == 0
    assert site.api.request("GET", secret)["data"]["auth_token"] == first


def no_host_comes(site: Site, why: str) -> None:
    """Once there is a RayCluster: its head is ready, and the autoscaler cannot get a node for any host."""
    site.await_object("rayclusters")
    site.pod(head())
    for number in range(4):
        pod = site.pod(worker(number, **unschedulable(NO_TPU_NODE)))
        failed = f"Node scale up in zones us-east5-b associated with this pod failed: {why}."
        site.event(pod, "FailedScaleUp", failed)


def test_make_cluster_ends_with_the_reason_when_waiting_is_of_no_use(site: Site) -> None:
    process = site.start("cluster", POLL_SECONDS=0.5, LASTING_SECONDS=1)
    no_host_comes(site, "GCE quota exceeded")
    code, printed = ended(process)
    assert code == 1
    assert "the hosts will not come by waiting:" in printed
    assert "4 hosts: quota: the project may not have so many chips" in printed
    assert "next: raise it: console.cloud.google.com/iam-admin/quotas" in printed


def test_make_cluster_gives_up_after_its_time_and_says_what_it_waited_for(site: Site) -> None:
    process = site.start("cluster", "--wait=0.1", POLL_SECONDS=0.5)
    no_host_comes(site, "GCE out of resources")
    code, printed = ended(process)
    assert code == 1
    assert "not all hosts came within 0.1 min (head ready, 0 of 4 hosts, 0 of 1 slices" in printed
    assert "4 hosts: no capacity: Google Cloud has no v6e 4x4 as on-demand" in printed
    assert "make cluster waits on, make stop ARGS=--cluster gives up" in printed


def test_make_cluster_is_content_with_the_slices_that_are_enough(site: Site, render: Render) -> None:
    elastic = {"generation": "v5p", "topology": "2x2x2", "num_slices": 2, "min_slices": 1}
    site.folder = render(project_id="acme-tpu", bucket="acme-tpu-data", namespace=site.namespace, **elastic)
    process = site.start("cluster", "--wait=0.1", POLL_SECONDS=0.5)
    site.await_object("rayclusters")
    site.pod(head())
    for number in range(2):
        site.pod(worker(number, ready=True))
    code, printed = ended(process)
    assert code == 0, printed
    assert "not all hosts came within 0.1 min (head ready, 2 of 4 hosts, 1 of 2 slices, 1 are enough" in printed
    assert "1 of 2 x v5p 2x2x2 are enough to train" in printed


def test_an_unknown_cluster_and_placeholders_are_refused_before_anything_is_asked(site: Site, render: Render) -> None:
    code, printed = ended(
        subprocess.Popen(
            [site.python, "-m", "ops.cluster"],
            cwd=site.folder,
            env={name: value for name, value in os.environ.items() if name != "KUBE_CONTEXT"}
            | {"KUBECONFIG": str(site.api.kubeconfig)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    )
    assert code == 1
    assert "kubectl knows no cluster 'gke_acme-tpu_us-east5-b_" in printed
    assert "make infra-credentials" in printed
    site.folder = render()
    code, printed = site.run("cluster")
    assert code == 1
    assert "project_id is still the placeholder" in printed


def test_another_image_and_a_rayjob_stand_in_the_way_of_a_cluster(site: Site) -> None:
    site.api.create(raycluster_of(site, image="repo/trainer:old"))
    code, printed = site.run("cluster")
    assert code == 1
    assert f"RayCluster {NAME} runs image old, the code in front of you is" in printed
    assert "make stop ARGS=--cluster" in printed
    code, printed = site.run("submit", "train")
    assert code == 1
    assert "the cluster runs image old, the code in front of you is" in printed


def raycluster_of(site: Site, image: str) -> Object:
    """A RayCluster with the least that a command looks at."""
    container = {"name": "ray-head", "image": image}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": NAME, "namespace": site.namespace},
        "spec": {"headGroupSpec": {"rayStartParams": {}, "template": {"spec": {"containers": [container]}}}},
    }


def test_make_job_asks_for_a_rayjob_with_deadlines_and_a_token_and_only_once(site: Site) -> None:
    code, printed = site.run("job", "steps=200", "--wait-hours=6")
    assert code == 0, printed
    job = site.get("rayjobs")
    assert job["spec"]["preRunningDeadlineSeconds"] == 6 * 3600
    assert job["spec"]["activeDeadlineSeconds"] == 7 * 24 * 3600
    assert job["spec"]["entrypoint"] == "python /app/train.py steps=200"
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    code, printed = site.run("job")
    assert code == 1
    assert f"RayJob {NAME} runs and holds the hosts: make status follows it, make stop ends it" in printed
    for command in (("cluster",), ("submit", "train")):
        assert "runs and holds the hosts" in site.run(*command)[1]

    site.set_status(
        "rayjobs", {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed", "failed": 4}
    )
    code, printed = site.run("status")
    assert code == 1
    assert f"RayJob {NAME} failed: the training failed, 4 times. Next: make logs" in printed
    first = job["metadata"]["uid"]
    assert site.run("job", "--queued")[0] == 0
    job = site.get("rayjobs")
    assert job["metadata"]["uid"] != first
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "tpu"}
    assert "waits in the queue" in site.run("status", "--once")[1]
    code, printed = site.run("stop")
    assert code == 0
    assert f"RayJob {NAME} is removed." in printed
    assert "Nothing runs in namespace" in site.run("status")[1]


def test_make_status_of_a_rayjob_says_why_its_hosts_do_not_come(site: Site) -> None:
    assert site.run("job")[0] == 0
    site.set_status("rayjobs", {"jobDeploymentStatus": "Initializing", "rayClusterName": f"{NAME}-abcde", "jobId": "x"})
    cluster = raycluster_of(site, "repo/trainer:tag")
    cluster["metadata"]["name"] = f"{NAME}-abcde"
    site.api.create(cluster)
    site.pod(head(), f"{NAME}-abcde")
    pod = site.pod(worker(0, **unschedulable(NO_TPU_NODE)), f"{NAME}-abcde")
    site.event(pod, "FailedScaleUp", "Node scale up failed: GCE out of resources.")
    code, printed = site.run("status", "--once")
    assert code == 0
    assert f"RayJob {NAME} waits for its hosts: head ready, 0 of 4 hosts, 0 of 1 slices" in printed
    assert "no capacity" in printed


MANIFEST = """
import json, sys
from ops import job
definition = json.load(sys.stdin)
(version,) = [entry for entry in definition["spec"]["versions"] if entry["name"] == "v1"]
fields = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
print(json.dumps(job.manifest(fields, False, 12, [])["spec"]))
"""


@pytest.mark.parametrize(
    ("version", "deadline", "token"), [("v1.4.2", False, False), ("v1.5.1", False, True), ("v1.6.2", True, True)]
)
def test_every_kuberay_gets_the_rayjob_that_it_knows(version: str, deadline: bool, token: bool, site: Site) -> None:
    from tests.control_plane import KUBERAY, custom_resource_definitions

    (definition,) = [
        d for d in custom_resource_definitions(KUBERAY, version) if d["metadata"]["name"] == "rayjobs.ray.io"
    ]
    printed = subprocess.check_output(
        [site.python, "-c", MANIFEST], input=json.dumps(definition), cwd=site.folder, text=True
    )
    spec = json.loads(printed)
    assert ("preRunningDeadlineSeconds" in spec) == deadline
    assert ("authOptions" in spec["rayClusterSpec"]) == token
    assert spec["activeDeadlineSeconds"] > 0


@pytest.fixture(scope="module")
def ray_head(run_python: Path) -> Iterator[RayHead]:
    with RayHead(run_python) as started:
        yield started


def until(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_train_status_logs_dashboard_and_stop_through_a_forwarded_port(site: Site, ray_head: RayHead) -> None:
    program = site.scratch / "program.py"
    program.write_text(PROGRAM)
    rayjob = site.folder / "k8s" / "job" / "rayjob.yaml"
    rayjob.write_text(re.sub("entrypoint: .*", f"entrypoint: {site.python} {program}", rayjob.read_text()))
    way = Way(ray_head.port)
    site.stand_in(way.port)

    code, printed = site.run("submit", "train")
    assert (code, "there is no RayCluster" in printed) == (1, True), printed
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{NAME}-ray-token", "namespace": site.namespace},
        "stringData": {"auth_token": ray_head.token},
    }
    site.api.create(secret)
    process = site.start("cluster", POLL_SECONDS=0.5)
    site.await_object("rayclusters")
    site.all_ready()
    assert ended(process)[0] == 0

    hold = site.scratch / "go-on"
    process = site.start("submit", "train", "steps=40", f"hold={hold}", "code=7")
    log = site.folder / "build" / "runs" / "pilot-1.log"
    until(lambda: log.exists() and "completed step: 19," in log.read_text())
    # The port-forward dies, as it does when the network changes: it is started again, and nothing else is.
    os.kill(int(site.forwards.read_text().split()[-1]), signal.SIGTERM)
    code, printed = site.run("submit", "train")
    assert code == 1
    assert "pilot-1 is running: make status follows it, make stop ends it" in printed
    code, printed = site.run("status", "--once")
    assert code == 0
    assert "pilot-1 running: step 20/40" in printed
    code, printed = site.run("logs")
    assert code == 0
    assert "completed step: 19," in printed
    code, printed = site.run("logs", "host=9")
    assert code == 1
    assert "host=9 is none of the 4 hosts that have a pod" in printed
    hold.touch()
    code, printed = ended(process)
    assert code == 7, printed
    steps = [int(step) for step in re.findall(r"^completed step: (\d+),", log.read_text(), re.MULTILINE)]
    assert steps == list(range(40))
    for pid in site.forwards.read_text().split():
        assert not Path("/proc", pid).exists(), "a port-forward was left behind"

    process = site.start("dashboard", "--no-open")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.match(r"Ray's dashboard: http://127\.0\.0\.1:\d+ \(only from this machine", line), line
    assert f"{NAME}-ray-token" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    code, printed = ended(process)
    assert (code, "The dashboard's port is closed." in printed) == (0, True)
    assert not Path("/proc", site.forwards.read_text().split()[-1]).exists()

    process = site.start("submit", "train", f"hold={site.scratch / 'never'}")
    until(lambda: (site.folder / "build" / "runs" / "pilot-2.log").exists())
    code, printed = site.run("stop")
    assert code == 0, printed
    assert "pilot-2 is stopped. make resume goes on from the newest checkpoint." in printed
    assert "The TPU node pools bill whether or not anything runs on them" in printed
    code, printed = ended(process)
    assert code == 1
    assert "pilot-2 was stopped" in printed

    code, printed = site.run("stop", "--cluster", GONE_SECONDS=1)
    assert code == 1  # no kubelet ends the pods
    assert "5 pods do not end within 1 s" in printed
    with pytest.raises(Exception, match="404"):
        site.get("rayclusters")


def test_doctor_reads_what_the_webhook_gave_and_goes_on_after_a_failure(site: Site) -> None:
    process = site.start("cluster", POLL_SECONDS=0.5)
    site.await_object("rayclusters")
    site.all_ready()
    assert ended(process)[0] == 0
    code, printed = site.run("doctor", TOOLS={"kubectl": "install it", "no-such-tool": "install that too"})
    assert code == 1
    lines = {match[2].strip(): match[1] for match in re.finditer(r"^(pass|FAIL|  - ) (.{16})", printed, re.MULTILINE)}
    assert lines["tools"] == "FAIL"
    assert "next: install that too" in printed
    assert lines["answers"] == "pass"
    assert lines["APIs"] == "  - "
    assert "not checked: tools comes first" in printed
    assert (lines["kubectl"], lines["Ray operator"], lines["namespace"]) == ("pass", "pass", "pass")
    assert "KubeRay 1.6 or later" in printed
    assert lines["pods"] == "pass"
    # The pods of this test have no TPU_WORKER_HOSTNAMES.
    assert lines["TPU webhook"] == "FAIL"
    assert "4 of 4 hosts lack TPU_WORKER_HOSTNAMES: the TPU webhook did not see them" in printed


def test_the_stand_in_is_the_real_kubectl_for_everything_else(site: Site) -> None:
    command = [site.scratch / "bin" / "kubectl", "version", "--client", "--output=json"]
    assert "gitVersion" in subprocess.check_output(list(map(str, command)), text=True)
