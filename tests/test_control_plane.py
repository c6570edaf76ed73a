"""Every manifest that the questionnaire can emit, taken by a real API server with strict field validation.

`make test-cluster` runs these: see tests/control_plane.py.
"""

import copy
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from copier import run_copy

from extensions import questionnaire as extension
from tests.cloud_support import run_env, variant
from tests.conftest import ROOT
from tests.control_plane import (
    KUBERAY,
    KUBERAY_VERSIONS,
    KUEUE,
    KUEUE_VERSIONS,
    PROGRAMS,
    ControlPlane,
    Refused,
)

pytestmark = pytest.mark.cluster
facts = extension.facts
KUBECTL = PROGRAMS / "kubectl"
MODES = yaml.safe_load((ROOT / "copier.yml").read_text())["cluster_mode"]["choices"]
RESERVATIONS = [
    "mine",
    "projects/other-project/reservations/theirs/reservationBlocks/block-1/reservationSubBlocks/sub-1",
]
# KubeRay got authOptions with 1.5.
FOLDERS_SINCE_1_5 = {"job-token"}


def matrix() -> Iterator[dict[str, Any]]:
    """Each generation with each capacity, mode, one slice and two, and one host where that is a shape of its own.

    The free answers (topology, reservation) are taken in turn.
    """
    for generation in facts.GENERATIONS:
        shapes = {
            hosts: itertools.cycle(
                [t for t in facts.topologies(generation) if facts.slice_of(generation, t).multi_host == several]
            )
            for hosts, several in (("one", False), ("several", True))
        }
        reservations = itertools.cycle(RESERVATIONS)
        for capacity, mode, (hosts, slices) in itertools.product(
            facts.capacities(generation), MODES, [("one", 1), ("several", 1), ("several", 2)]
        ):
            yield {
                "generation": generation,
                "topology": next(shapes[hosts]),
                "capacity": capacity,
                "reservation": next(reservations) if capacity == "reservation" else "",
                "cluster_mode": mode,
                "num_slices": slices,
            }


JOBS = list(matrix())


@pytest.fixture(scope="module")
def rendered(template_files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    """What kubectl would apply for each of JOBS, by folder of k8s/; each in a namespace of its own."""
    small = tmp_path_factory.mktemp("k8s-template")
    shutil.copytree(template_files / "extensions", small / "extensions")
    shutil.copytree(template_files / "template/k8s", small / "template/k8s")
    shutil.copy2(template_files / "copier.yml", small)
    answers_file = "template/{{ _copier_conf.answers_file }}.jinja"
    shutil.copy2(template_files / answers_file, small / answers_file)
    result = []
    for number, job in enumerate(JOBS):
        target = tmp_path_factory.mktemp("run")
        data = {"project_id": "acme-tpu", "bucket": "acme-tpu-data", "namespace": f"matrix-{number}", **job}
        run_copy(str(small), target, data=data, defaults=True, quiet=True, unsafe=True)
        result.append({folder.name: kustomize(folder) for folder in sorted((target / "k8s").iterdir())})
    return result


def kustomize(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run([KUBECTL, "kustomize", folder], check=True, capture_output=True, text=True)
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture
def newest(api_server: ControlPlane) -> ControlPlane:
    """The API server with the newest CRDs, also after a test that installed older ones."""
    api_server.install(KUBERAY, KUBERAY_VERSIONS[-1])
    api_server.install(KUEUE, KUEUE_VERSIONS[-1])
    return api_server


@pytest.fixture(scope="module", autouse=True)
def _restored(api_server: ControlPlane) -> Iterator[None]:
    """Leave the newest CRDs to the tests of other files."""
    yield
    api_server.install(KUBERAY, KUBERAY_VERSIONS[-1])
    api_server.install(KUEUE, KUEUE_VERSIONS[-1])


def test_the_matrix_has_both_forms_of_a_reservation() -> None:
    assert {job["reservation"] for job in JOBS} == {"", *RESERVATIONS}


@pytest.mark.parametrize("version", KUBERAY_VERSIONS)
def test_the_api_server_takes_every_manifest(
    version: str, api_server: ControlPlane, rendered: list[dict[str, list[dict[str, Any]]]]
) -> None:
    api_server.install(KUBERAY, version)
    for job, folders in zip(JOBS, rendered, strict=True):
        (cluster,) = folders["cluster"]
        api_server.ensure_namespace(cluster["metadata"]["namespace"])
        for folder, resources in folders.items():
            if version.startswith("v1.4.") and folder in FOLDERS_SINCE_1_5:
                continue
            for resource in resources:
                if resource["kind"] != "Namespace":
                    try:
                        api_server.create(resource, dryRun="All")
                    except Refused as refused:
                        raise AssertionError(f"{job}, k8s/{folder}: {refused}") from None


@pytest.mark.parametrize("version", KUEUE_VERSIONS)
def test_every_supported_kueue_takes_the_queue(
    version: str, api_server: ControlPlane, rendered: list[dict[str, list[dict[str, Any]]]]
) -> None:
    api_server.install(KUEUE, version)
    for folders in rendered:
        for resource in folders["queue"]:
            api_server.ensure_namespace(resource["metadata"].get("namespace", "default"))
            api_server.create(resource, dryRun="All")


def pods(cluster: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the head and a worker as pods of their own."""
    spec = cluster["spec"]
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        template = copy.deepcopy(group["template"])
        name = template["spec"]["containers"][0]["name"]
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], "name": name, "namespace": cluster["metadata"]["namespace"]},
            "spec": template["spec"],
        }


def test_the_pod_templates_are_pods(newest: ControlPlane, rendered: list[dict[str, list[dict[str, Any]]]]) -> None:
    """A CRD's schema knows the fields of a pod, but not the rules between them; those are checked for pods alone."""
    for folders in rendered:
        (cluster,) = folders["cluster"]
        newest.ensure_namespace(cluster["metadata"]["namespace"])
        for pod in pods(cluster):
            newest.create(pod, dryRun="All")


def test_the_pods_keep_to_the_strictest_pod_security_standard(newest: ControlPlane) -> None:
    """The head fits `restricted` whole, and so does a worker: the mount's driver adds containers that do, too."""
    name = "restricted"
    labels = {
        f"pod-security.kubernetes.io/enforce{suffix}": value for suffix, value in (("", name), ("-version", "latest"))
    }
    newest.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    (cluster,) = kustomize(variant("default") / "k8s/cluster")
    (job,) = kustomize(variant("default") / "k8s/job")
    cluster["metadata"]["namespace"] = name
    submitter = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "submitter", "namespace": name},
        "spec": job["spec"]["submitterPodTemplate"]["spec"],
    }
    for pod in [*pods(cluster), submitter]:
        newest.create(pod, dryRun="All")
    head, _ = pods(cluster)
    del head["spec"]["securityContext"]
    with pytest.raises(Refused, match="violates PodSecurity"):
        newest.create(head, dryRun="All")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "workerGroupSpecs", 0, "numOfHost"), 4),
        (("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "resource"), {}),
        (("spec", "workerGroupSpecs", 0, "replicas"), "four"),
    ],
)
def test_a_misspelt_field_and_a_wrong_type_are_refused(path: tuple[Any, ...], value: Any, newest: ControlPlane) -> None:
    (cluster,) = kustomize(variant("default") / "k8s/cluster")
    newest.ensure_namespace(cluster["metadata"]["namespace"])
    place = cluster
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(Refused, match=str(path[-1])):
        newest.create(cluster, dryRun="All")


def test_the_job_with_a_token_is_refused_by_kuberay_one_four(api_server: ControlPlane) -> None:
    api_server.install(KUBERAY, KUBERAY_VERSIONS[0])
    (job,) = kustomize(variant("default") / "k8s/job-token")
    api_server.ensure_namespace(job["metadata"]["namespace"])
    with pytest.raises(Refused, match="authOptions"):
        api_server.create(job, dryRun="All")


def test_the_commands_of_the_manifests_work_and_may_be_repeated(newest: ControlPlane, tmp_path: Path) -> None:
    """What the comments in k8s/ and `make` tell kubectl to do: base, cluster, queue, job, applied twice."""
    repository = variant("default")
    environment = os.environ | {"KUBECONFIG": str(newest.kubeconfig), "HOME": str(tmp_path)}

    def kubectl(*arguments: str) -> str:
        done = subprocess.run([KUBECTL, *arguments], cwd=repository, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(folder: str) -> list[str]:
        """Apply, and return the versions of what is then there."""
        kubectl("apply", "--validate=strict", "-k", f"k8s/{folder}")
        found = json.loads(kubectl("get", "-k", f"k8s/{folder}", "--output=json"))
        return [item["metadata"]["resourceVersion"] for item in found.get("items", [found])]

    for folder in ("base", "cluster", "queue", "job-queued"):
        assert apply(folder) == apply(folder)
    names = run_env(repository)
    shown = kubectl("get", "raycluster", "--namespace", names["NAMESPACE"], "--output", "name")
    assert shown.strip() == f"raycluster.ray.io/{names['RAYCLUSTER_NAME']}"


# The harness itself.


def test_the_programs_end_also_when_the_tests_are_killed(tmp_path: Path) -> None:
    program = (
        "import time\nfrom tests.control_plane import ControlPlane\nwith ControlPlane() as plane:\n"
        "    print(*plane.pids(), flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "etcd or kube-apiserver outlived the tests"
        time.sleep(0.2)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_without_go_one_message_says_how_to_get_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.control_plane"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "https://go.dev/dl" in done.stderr
    assert "Traceback" not in done.stderr
