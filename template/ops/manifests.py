"""The folders of k8s/ as kubectl takes them: rendered by kustomize, with the tag of the image of the code at hand."""

import subprocess
from typing import Any

import yaml

from ops import image_tag
from ops.run_env import ROOT
from ops.terminal import UserError

NOT_BUILT = "not-built-yet"  # the tag that stands in k8s/*/kustomization.yaml


def rendered(folder: str) -> list[dict[str, Any]]:
    """Return the objects of k8s/<folder>. Raises UserError with kubectl's own words."""
    try:
        done = subprocess.run(
            ["kubectl", "kustomize", f"k8s/{folder}"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        raise UserError("kubectl is not installed: gcloud components install kubectl") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"kubectl kustomize k8s/{folder} did not end within 60 s: try it by hand") from None
    if done.returncode:
        raise UserError(f"k8s/{folder}: {done.stderr.strip()}")
    return list(yaml.safe_load_all(done.stdout.replace(f":{NOT_BUILT}", f":{tag()}")))


def tag() -> str:
    """Return the tag of the image of the code at hand. Raises UserError when a file of it is missing."""
    try:
        return image_tag.image_tag(ROOT)
    except FileNotFoundError as missing:
        name = missing.filename or missing.args[0]
        raise UserError(f"{name} is missing, but it belongs into the image (see .dockerignore)") from None


def entrypoint() -> list[str]:
    """Return the command that trains, as the RayJob has it."""
    text = (ROOT / "k8s" / "job" / "rayjob.yaml").read_text(encoding="utf-8")
    return str(yaml.safe_load(text)["spec"]["entrypoint"]).split()
