"""k8s/: what kubectl would apply, against the rules of KubeRay, the TPU webhook and the gcsfuse driver."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cloud_support import (
    GENERATIONS,
    TEMPLATE,
    VARIANTS,
    all_topologies,
    flags_of,
    kustomize,
    plan_lines,
    raycluster,
    render,
    run_env,
    variant,
)

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed; CI runs this")


def head_of(spec: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = spec["headGroupSpec"]["template"]["spec"]
    return pod


def workers_of(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the one worker group, and its pod's spec."""
    (group,) = spec["workerGroupSpecs"]
    return group, group["template"]["spec"]


def pods_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [head_of(spec), workers_of(spec)[1]]


def env_of(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def rayjob(repository: Path, folder: str = "job") -> dict[str, Any]:
    (job,) = kustomize(repository, folder)
    return job


@pytest.mark.parametrize("name", VARIANTS)
def test_worker_counts_agree_between_manifest_pools_and_run_env(name: str) -> None:
    values = run_env(variant(name))
    group, pod = workers_of(raycluster(variant(name))["spec"])
    chips = int(pod["containers"][0]["resources"]["limits"]["google.com/tpu"])
    assert group["replicas"] == group["maxReplicas"] == int(values["NUM_SLICES"])
    assert group["minReplicas"] == int(values["MIN_SLICES"])
    assert (group["minReplicas"] < group["replicas"]) == (name == "v5p-elastic")
    assert group["numOfHosts"] == int(values["HOSTS_PER_SLICE"])
    assert chips == int(values["CHIPS_PER_HOST"])
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == values["GKE_ACCELERATOR"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == values["TOPOLOGY"]
    pools = [flags_of(line) for line in plan_lines(variant(name)) if "node-pools create" in line]
    if values["CLUSTER_MODE"] == "standard":
        assert len(pools) == group["replicas"]
        for pool in pools:
            assert pool["--machine-type"] == values["MACHINE_TYPE"]
            assert int(pool.get("--max-nodes", pool["--num-nodes"])) == group["numOfHosts"]


# What ray-operator/controllers/ray/utils/validation.go and constant.go and the TPU webhook's main.go enforce.


@pytest.mark.parametrize("name", VARIANTS)
def test_the_tpu_webhook_accepts_the_worker_group(name: str) -> None:
    group, pod = workers_of(raycluster(variant(name))["spec"])
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    per_host = int(pod["containers"][0]["resources"]["limits"]["google.com/tpu"])
    chips = math.prod(int(side) for side in topology.split("x"))
    assert group["numOfHosts"] == max(chips // per_host, 1)
    assert "affinity" not in pod, "the webhook replaces it"
    requests = pod["containers"][0]["resources"]["requests"]
    assert requests["google.com/tpu"] == pod["containers"][0]["resources"]["limits"]["google.com/tpu"]


@pytest.mark.parametrize("name", VARIANTS)
def test_kuberay_accepts_the_names(name: str) -> None:
    cluster, job = raycluster(variant(name)), rayjob(variant(name))
    for resource, limit in ((cluster, 41), (job, 35)):
        assert len(resource["metadata"]["name"]) <= limit
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", resource["metadata"]["name"])
    assert cluster["metadata"]["name"] == run_env(variant(name))["RAYCLUSTER_NAME"]


def test_the_longest_project_name_still_fits() -> None:
    name = "a" + "b" * 34
    assert rayjob(render(project_name=name))["metadata"]["name"] == name


@pytest.mark.parametrize("folder", ["job", "job-token"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_job_runs_the_very_cluster_of_the_manifest(name: str, folder: str) -> None:
    spec = rayjob(variant(name), folder)["spec"]["rayClusterSpec"]
    expected = raycluster(variant(name))["spec"]
    spec.pop("authOptions", None)
    for inner in (spec, expected):
        for pod in pods_of(inner):
            pod["containers"][0]["env"] = [
                entry for entry in pod["containers"][0]["env"] if not entry["name"].startswith("RAY_AUTH")
            ]
    assert spec == expected


def test_the_job_frees_the_tpus_and_bounds_every_wait() -> None:
    spec = rayjob(variant("default"))["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert 0 < spec["activeDeadlineSeconds"] <= 7 * 24 * 3600
    assert spec["backoffLimit"] == int(run_env(variant("default"))["MAX_FAILURES"])


def test_the_job_starts_the_program_that_the_image_holds() -> None:
    program = rayjob(variant("default"))["spec"]["entrypoint"].split()
    docker = (variant("default") / "Dockerfile").read_text()
    assert program == ["python", "/app/train.py"]
    assert "WORKDIR /app\n" in docker
    assert re.search(r"^COPY .*\btrain\.py\b.* \./$", docker, re.MULTILINE)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_container_runs_the_image_that_is_built(name: str) -> None:
    repository = run_env(variant(name))["IMAGE_REPOSITORY"]
    for folder in ("cluster", "job", "job-token"):
        text = json.dumps(kustomize(variant(name), folder))
        images = set(re.findall(r'"image": "([^"]+)"', text))
        assert images == {f"{repository}:not-built-yet"}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_queue_holds_exactly_the_chips_that_the_job_asks_for(name: str) -> None:
    made = {(r["kind"], r["metadata"]["name"]): r for r in kustomize(variant(name), "queue")}
    (local,) = [r for (kind, _), r in made.items() if kind == "LocalQueue"]
    job = rayjob(variant(name), "job-queued")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]
    assert job["metadata"]["namespace"] == local["metadata"]["namespace"]
    # What Kueue asks of a RayJob (its pkg/controller/jobs/rayjob): a cluster of its own, removed at the end.
    assert job["spec"]["suspend"] is job["spec"]["shutdownAfterJobFinishes"] is True
    group, pod = workers_of(job["spec"]["rayClusterSpec"])
    wanted = (
        int(pod["containers"][0]["resources"]["requests"]["google.com/tpu"]) * group["numOfHosts"] * group["replicas"]
    )
    queue = made["ClusterQueue", local["spec"]["clusterQueue"]]
    quotas = {
        resource["name"]: resource["nominalQuota"]
        for covered in queue["spec"]["resourceGroups"]
        for flavor in covered["flavors"]
        for resource in flavor["resources"]
    }
    assert quotas["google.com/tpu"] == wanted
    assert set(quotas) == set(pod["containers"][0]["resources"]["requests"])
    for covered in queue["spec"]["resourceGroups"]:
        for flavor in covered["flavors"]:
            assert ("ResourceFlavor", flavor["name"]) in made


# Who may reach the head, and with what.


def test_every_process_says_how_it_authenticates() -> None:
    for pod in pods_of(raycluster(variant("default"))["spec"]):
        env = env_of(pod["containers"][0])
        assert env["RAY_AUTH_MODE"] == "token"
        assert env["RAY_AUTH_TOKEN"]["secretKeyRef"]["key"] == "auth_token"


@pytest.mark.parametrize(("folder", "mode"), [("job", "disabled"), ("job-token", "token")])
def test_all_parts_of_a_job_agree_on_authentication(folder: str, mode: str) -> None:
    spec = rayjob(variant("default"), folder)["spec"]
    pods = [*pods_of(spec["rayClusterSpec"]), spec["submitterPodTemplate"]["spec"]]
    for pod in pods:
        env = env_of(pod["containers"][0])
        assert env["RAY_AUTH_MODE"] == mode
        assert "RAY_AUTH_TOKEN" not in env, "KubeRay adds it, from the token that it makes for each cluster"
    assert (spec["rayClusterSpec"].get("authOptions") == {"mode": "token"}) == (mode == "token")


def test_only_rays_own_pods_the_submitter_and_the_operator_reach_the_head() -> None:
    policies = {r["metadata"]["name"]: r for r in kustomize(variant("default"), "base") if r["kind"] == "NetworkPolicy"}
    policy, closed = policies.pop("ray-pods"), policies.pop("ray-job-submitter")
    assert not policies
    assert policy["spec"]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay"}
    assert all("from" in rule for rule in policy["spec"]["ingress"])
    unlimited = [rule for rule in policy["spec"]["ingress"] if "ports" not in rule]
    assert unlimited == [{"from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay"}}}]}]
    labels = rayjob(variant("default"))["spec"]["submitterPodTemplate"]["metadata"]["labels"]
    assert {"podSelector": {"matchLabels": labels}} in policy["spec"]["ingress"][1]["from"]
    # Nothing reaches the submitter.
    assert closed["spec"] == {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"]}


@pytest.mark.parametrize("folder", ["cluster", "job", "job-token"])
def test_nothing_is_public_and_no_secret_stands_in_a_file(folder: str) -> None:
    for resource in kustomize(variant("default"), folder):
        assert "Service" not in resource["kind"]
        text = json.dumps(resource)
        for word in ("LoadBalancer", "NodePort", "hostNetwork"):
            assert word not in text
    assert not any(r["kind"] in ("Secret", "Ingress", "Service") for r in kustomize(variant("default"), "base"))


def test_the_service_account_is_the_one_that_may_use_the_bucket() -> None:
    values = run_env(variant("default"))
    principals = [line for line in plan_lines(variant("default")) if "principal://" in line]
    for pod in pods_of(raycluster(variant("default"))["spec"]):
        for line in principals:
            assert f"/subject/ns/{values['NAMESPACE']}/sa/{pod['serviceAccountName']}" in line
    (account,) = [r for r in kustomize(variant("default"), "base") if r["kind"] == "ServiceAccount"]
    assert account["metadata"] == {"name": values["SERVICE_ACCOUNT"], "namespace": values["NAMESPACE"]}
    assert account["automountServiceAccountToken"] is False


def test_the_default_namespace_is_not_made() -> None:
    kinds = {r["kind"] for r in kustomize(variant("v6e-flex-start"), "base")}
    assert "Namespace" not in kinds
    assert "Namespace" in {r["kind"] for r in kustomize(variant("default"), "base")}


# Where the pods may land.


@pytest.mark.parametrize(
    ("name", "selectors"),
    [
        ("default", {}),
        ("v6e-two-slices-spot", {"gke-spot": "true"}),
        ("v6e-flex-start", {"gke-flex-start": "true"}),
        ("v6e-shared-reservation", {}),
        ("v6e-autopilot-spot", {"gke-spot": "true"}),
        ("v6e-autopilot-flex-start", {"gke-flex-start": "true"}),
        (
            "v6e-autopilot-reservation",
            {
                "reservation-affinity": "specific",
                "reservation-name": "res",
                "reservation-project": "other-project",
                "reservation-blocks": "block-1",
            },
        ),
        ("tpu7x-autopilot-two-slices", {"placement-policy-name": "tpu7x-2x2x2"}),
    ],
)
def test_the_selectors_follow_capacity_and_mode(name: str, selectors: dict[str, str]) -> None:
    _, pod = workers_of(raycluster(variant(name))["spec"])
    always = {"gke-tpu-accelerator", "gke-tpu-topology"}
    found = {
        key.removeprefix("cloud.google.com/"): value
        for key, value in pod["nodeSelector"].items()
        if key.startswith("cloud.google.com/")
    }
    assert {key: value for key, value in found.items() if key not in always} == selectors
    tolerated = {toleration["key"] for toleration in pod["tolerations"]}
    assert "google.com/tpu" in tolerated
    assert ("cloud.google.com/gke-spot" in tolerated) == ("gke-spot" in selectors)


def test_an_autopilot_policy_is_the_one_that_the_scripts_make() -> None:
    repository = variant("tpu7x-autopilot-two-slices")
    _, pod = workers_of(raycluster(repository)["spec"])
    (line,) = [line for line in plan_lines(repository) if "workload-policy" in line]
    assert pod["nodeSelector"]["cloud.google.com/placement-policy-name"] in line.split()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_requests_leave_room_on_the_machine(name: str) -> None:
    values = run_env(variant(name))
    _, pod = workers_of(raycluster(variant(name))["spec"])
    resources = pod["containers"][0]["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    memory = int(resources["limits"]["memory"].removesuffix("Gi"))
    ram, cpus = int(values["RAM_GIB_PER_HOST"]), int(values["VCPUS_PER_HOST"])
    # GKE keeps 25 % of the first 4 GiB, 20 % of the next 4, 10 % of the next 8, 6 % of the next 112, 2 % of the rest.
    kept = sum(
        share * max(0, min(ram, high) - low)
        for low, high, share in ((0, 4, 0.25), (4, 8, 0.2), (8, 16, 0.1), (16, 128, 0.06), (128, 10**6, 0.02))
    )
    assert 0.8 * ram <= memory <= ram - kept - 2
    assert 0.7 * cpus <= int(resources["requests"]["cpu"]) <= cpus - 4
    (shared,) = [volume for volume in pod["volumes"] if volume["name"] == "shared-memory"]
    assert int(shared["emptyDir"]["sizeLimit"].removesuffix("Gi")) > 0.3 * memory


# Each fault of the tutorial that the manifests leave behind. F numbers are those of the project's list of faults.


def test_f6_autopilot_says_which_capacity_it_wants() -> None:
    _, pod = workers_of(raycluster(variant("v6e-autopilot-spot"))["spec"])
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"


def test_f7_the_mounts_limits_are_lifted_on_standard_only() -> None:
    for name, lifted in (("default", True), ("v6e-autopilot-spot", False)):
        group, _ = workers_of(raycluster(variant(name))["spec"])
        limits = {k: v for k, v in group["template"]["metadata"]["annotations"].items() if k.endswith("-limit")}
        assert len(limits) == 3
        assert (set(limits.values()) == {"0"}) == lifted


def test_f8_the_cache_volume_has_the_name_that_the_driver_looks_for() -> None:
    group, pod = workers_of(raycluster(variant("default"))["spec"])
    names = [volume["name"] for volume in pod["volumes"]]
    assert "gke-gcsfuse-cache" in names
    assert "gcs-fuse-cache" not in names
    assert group["template"]["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"


def test_f9_the_mount_belongs_to_the_user_of_the_container() -> None:
    _, pod = workers_of(raycluster(variant("default"))["spec"])
    (data,) = [volume["csi"] for volume in pod["volumes"] if volume["name"] == "data"]
    options = data["volumeAttributes"]["mountOptions"].split(",")
    assert {"uid=1000", "gid=1000", "dir-mode=775", "file-mode=664"} <= set(options)
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000
    assert data["volumeAttributes"]["bucketName"] == run_env(variant("default"))["BUCKET"]


def test_f10_the_mount_is_read_only_so_no_checkpoint_goes_through_it() -> None:
    _, pod = workers_of(raycluster(variant("default"))["spec"])
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == "/data"]
    assert mount["readOnly"] is True


def test_f20_f21_no_debug_environment() -> None:
    for pod in pods_of(raycluster(variant("default"))["spec"]):
        assert (
            not {"XLA_FLAGS", "TPU_SLICE_BUILDER_DUMP_CHIP_FORCE", "ENABLE_PJRT_COMPATIBILITY"}
            & env_of(pod["containers"][0]).keys()
        )


def test_f22_jax_has_the_cpu_backend_beside_the_tpu() -> None:
    _, pod = workers_of(raycluster(variant("default"))["spec"])
    assert env_of(pod["containers"][0])["JAX_PLATFORMS"] == "tpu,cpu"


def test_f25_the_ray_version_is_the_locked_one_and_all_counts_are_given() -> None:
    lock = (TEMPLATE / "template/requirements.lock").read_text()
    locked = re.search(r"^ray(?:\[[^]]*\])?==(\S+)", lock, re.MULTILINE)
    assert locked is not None
    spec = raycluster(variant("default"))["spec"]
    assert spec["rayVersion"] == locked[1]
    assert {"replicas", "minReplicas", "maxReplicas", "numOfHosts"} <= workers_of(spec)[0].keys()


def test_f26_workers_are_sized_by_their_machine() -> None:
    sizes = set()
    for name in ("v5e-one-chip-spot", "v5e-single-host-8t", "default"):
        _, pod = workers_of(raycluster(variant(name))["spec"])
        assert "cpu" not in pod["containers"][0]["resources"]["limits"]
        sizes.add(pod["containers"][0]["resources"]["limits"]["memory"])
    assert len(sizes) == 3


def test_f27_shared_memory_has_a_limit() -> None:
    for pod in pods_of(raycluster(variant("default"))["spec"]):
        (shared,) = [volume for volume in pod["volumes"] if volume["name"] == "shared-memory"]
        assert shared["emptyDir"]["medium"] == "Memory"
        assert shared["emptyDir"]["sizeLimit"].endswith("Gi")


def test_f28_the_head_takes_no_work_and_stays_on_the_cpu_pool() -> None:
    spec = raycluster(variant("default"))["spec"]
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert head_of(spec)["nodeSelector"]["cloud.google.com/gke-nodepool"] == "default-pool"
    annotations = spec["headGroupSpec"]["template"]["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


def test_f31_a_job_ends_by_itself() -> None:
    assert rayjob(variant("default"))["spec"]["submissionMode"] == "K8sJobMode"


@pytest.mark.parametrize("folder", ["cluster", "job", "job-token"])
def test_f35_no_container_is_root_or_privileged(folder: str) -> None:
    (resource,) = kustomize(variant("default"), folder)
    spec = resource["spec"].get("rayClusterSpec", resource["spec"])
    pods = pods_of(spec)
    if "submitterPodTemplate" in resource["spec"]:
        pods.append(resource["spec"]["submitterPodTemplate"]["spec"])
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


# The files themselves.


def test_every_branch_of_the_manifests_has_a_variant() -> None:
    seen = [run_env(variant(name)) for name in VARIANTS]
    assert {values["GENERATION"] for values in seen} == set(GENERATIONS)
    for mode in ("standard", "autopilot"):
        capacities = {values["CAPACITY"] for values in seen if values["CLUSTER_MODE"] == mode}
        assert {"on-demand", "spot", "reservation", "flex-start"} == capacities


def test_yamllint_has_nothing_to_say() -> None:
    paths = [str(variant(name) / "k8s") for name in VARIANTS] + [str(variant("default") / "cloudbuild.yaml")]
    checked = subprocess.run(
        [sys.executable, "-m", "yamllint", "--strict", "-c", str(TEMPLATE / ".yamllint.yml"), *paths],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", VARIANTS)
def test_the_kubernetes_api_knows_every_field(name: str) -> None:
    """Kubernetes' own kinds as they are; the pods inside a RayCluster or RayJob as the Pods that they become."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    documents = kustomize(variant(name), "base")
    job = rayjob(variant(name))["spec"]
    pods = [*pods_of(job["rayClusterSpec"]), job["submitterPodTemplate"]["spec"]]
    for number, pod in enumerate(pods):
        documents.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": pod})
    for document in documents:
        kubernetes_validate.validate(document, "1.35", strict=True)


@pytest.mark.sweep
def test_the_webhooks_rule_holds_for_every_slice() -> None:
    for generation, topology in all_topologies():
        test_spec = raycluster(render(generation=generation, topology=topology))["spec"]
        group, pod = workers_of(test_spec)
        per_host = int(pod["containers"][0]["resources"]["limits"]["google.com/tpu"])
        assert group["numOfHosts"] * per_host == math.prod(int(side) for side in topology.split("x"))
