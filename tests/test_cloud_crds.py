"""RayCluster, RayJob and queue against the schemas of KubeRay's and Kueue's own releases, unknown fields refused.

The schemas come with the projects' Go modules, which are fetched for the test and not committed. KubeRay 1.7.0 is left
out: the Go module proxy does not serve it.
"""

import functools
import shutil
from typing import Any

import pytest

from tests.cloud_support import kustomize, variant
from tests.control_plane import (
    KUBERAY,
    KUBERAY_VERSIONS,
    KUEUE,
    KUEUE_VERSIONS,
    ControlPlaneError,
    custom_resource_definitions,
)

pytestmark = [
    pytest.mark.skipif(not shutil.which("go"), reason="Go is not installed (https://go.dev/dl); CI runs this"),
    pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed; CI runs this"),
]
jsonschema = pytest.importorskip("jsonschema")


def strict(schema: Any) -> Any:
    """Refuse fields that the schema does not name, as the API server does with strict field validation."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
    return result


@functools.cache
def validator(name: str, version: str, kind: str, api: str) -> Any:
    try:
        definitions = custom_resource_definitions(name, version)
    except ControlPlaneError as error:
        pytest.skip(f"{name} {version} cannot be fetched: {error}")
    (crd,) = [each for each in definitions if each["spec"]["names"]["kind"] == kind]
    (schema,) = [entry["schema"]["openAPIV3Schema"] for entry in crd["spec"]["versions"] if entry["name"] == api]
    schema = strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(schema)


def errors(version: str, resource: dict[str, Any]) -> list[str]:
    group, api = resource["apiVersion"].split("/")
    name = KUBERAY if group == "ray.io" else KUEUE
    found = validator(name, version, resource["kind"], api).iter_errors(resource)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


@pytest.mark.parametrize("version", KUBERAY_VERSIONS)
@pytest.mark.parametrize("name", ["default", "v6e-flex-start", "v6e-autopilot-reservation", "tpu7x-multi-host"])
def test_every_supported_kuberay_knows_every_field(name: str, version: str) -> None:
    for folder in ("cluster", "job", "job-queued"):
        (resource,) = kustomize(variant(name), folder)
        assert errors(version, resource) == []


@pytest.mark.parametrize("version", KUBERAY_VERSIONS)
def test_the_job_with_a_token_needs_kuberay_one_five(version: str) -> None:
    (resource,) = kustomize(variant("default"), "job-token")
    assert bool(errors(version, resource)) == (version == "v1.4.2")


@pytest.mark.parametrize("version", KUEUE_VERSIONS)
def test_kueue_knows_every_field_of_the_queue(version: str) -> None:
    for resource in kustomize(variant("default"), "queue"):
        assert errors(version, resource) == []


@pytest.mark.parametrize("version", KUBERAY_VERSIONS)
def test_a_misspelt_field_would_be_refused(version: str) -> None:
    (resource,) = kustomize(variant("default"), "cluster")
    resource["spec"]["workerGroupSpecs"][0]["numOfHost"] = 4
    assert errors(version, resource)
