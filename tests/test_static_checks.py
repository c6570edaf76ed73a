"""checkov over everything that is rendered: what it finds is mended, or accepted here with the reason."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cloud_support import VARIANTS, kustomize, variant
from tests.conftest import ROOT

ACCEPTED = {
    "CKV_DOCKER_2": "Kubernetes ignores HEALTHCHECK; the manifests bring probes",
    "CKV_K8S_8": "the submitter lives as long as its one command, so it needs no liveness probe",
    "CKV_K8S_9": "nothing asks the submitter whether it is ready",
    "CKV_K8S_11": "a CPU limit would throttle the only container of its host",
    "CKV_K8S_15": "the tag is the image's content, so a copy that is there is the right one",
    "CKV_K8S_21": "whoever answers namespace=default wants it",
    "CKV_K8S_22": "Ray, JAX and MaxText write below /tmp and the home folder",
    "CKV_K8S_35": "Ray, Hugging Face and W&B read their tokens from the environment",
    "CKV_K8S_40": "1000 is the image's own user, and that of Ray's images",
    "CKV_K8S_43": "the tag is the image's content, and the registry refuses to move tags",
}


@pytest.fixture(scope="module")
def checkov() -> Path:
    """checkov in an environment of its own: it pins older versions of what this project's tools need."""
    lock = ROOT / "tools" / "checkov.lock"
    folder = ROOT / "build" / f"checkov-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    program = folder / "bin" / "checkov"
    if not program.exists():
        uv = subprocess.run(
            [ROOT / "template/setup.sh", "uv"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()
        shutil.rmtree(folder, ignore_errors=True)
        commands: list[list[str | Path]] = [
            ["venv", "--python", sys.executable, folder],
            ["pip", "sync", "--python", folder / "bin" / "python", "--require-hashes", lock],
        ]
        for command in commands:
            subprocess.run([uv, "--quiet", *command], check=True, timeout=300)
    return program


def as_pods(repository: Path) -> list[dict[str, Any]]:
    """Return the plain resources, and the pods inside RayCluster and RayJob, which checkov does not know, as Pods."""
    found = [resource for folder in ("base", "queue") for resource in kustomize(repository, folder)]
    (job,) = kustomize(repository, "job")
    cluster = job["spec"]["rayClusterSpec"]
    templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for template in templates:  # KubeRay adds the label
        template["metadata"].setdefault("labels", {})["app.kubernetes.io/name"] = "kuberay"
    for template in [*templates, job["spec"]["submitterPodTemplate"]]:
        name = template["spec"]["containers"][0]["name"]
        metadata = {**template["metadata"], "name": name, "namespace": job["metadata"]["namespace"]}
        found.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    return found


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed; CI runs this")
def test_checkov_finds_only_what_is_accepted_with_a_reason(checkov: Path, tmp_path: Path) -> None:
    for name in VARIANTS:
        target = tmp_path / name
        target.mkdir()
        (target / "resources.yaml").write_text(yaml.safe_dump_all(as_pods(variant(name))))
    for path in ("Dockerfile", "cloudbuild.yaml", ".github", "config", "run.env"):
        source = variant("default") / path
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, tmp_path / path)
    done = subprocess.run(
        [
            checkov,
            f"--directory={tmp_path}",
            "--framework=kubernetes,dockerfile,github_actions,secrets",
            "--output=json",
            "--skip-download",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    reports = json.loads(done.stdout)
    assert {report["check_type"] for report in reports} >= {"kubernetes", "dockerfile", "github_actions"}
    failed = {
        check["check_id"]: f"{check['check_id']} {check['check_name']}: {check['resource']}"
        for report in reports
        for check in report["results"]["failed_checks"]
    }
    assert not {text for check, text in failed.items() if check not in ACCEPTED}
    assert set(failed) == set(ACCEPTED), "accepted, but no longer found: take it out"


@pytest.mark.slow  # the first time Go fetches and builds it
@pytest.mark.skipif(not shutil.which("go"), reason="Go is not installed (https://go.dev/dl); CI runs this")
def test_actionlint_has_nothing_to_say_and_would_see_a_fault(tmp_path: Path) -> None:
    def actionlint(*workflows: Path) -> str:
        shellcheck = Path(sys.executable).parent / "shellcheck"
        return subprocess.run(
            ["go", "tool", "actionlint", "-no-color", f"-shellcheck={shellcheck}", *workflows],
            cwd=ROOT / "tools" / "actionlint",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        ).stdout

    rendered = variant("default") / ".github" / "workflows" / "check.yml"
    assert actionlint(ROOT / ".github" / "workflows" / "ci.yml", rendered) == ""
    broken = tmp_path / "broken.yml"
    broken.write_text(rendered.read_text().replace("runs-on:", "run-on:"))
    assert "run-on" in actionlint(broken)
