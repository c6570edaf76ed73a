"""The two locks: complete, hashed, from the ordinary index, and what the requirements ask for."""

import re
import tomllib
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "template"


def host(**changes: str) -> dict[str, str]:
    """The marker variables of Python 3.12 on a TPU host (Linux, x86-64), with changes."""
    here = cast("dict[str, str]", dict(default_environment()))
    tpu_host = {
        "python_version": "3.12",
        "python_full_version": "3.12.1",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    return here | tpu_host | changes


def requirements(name: str) -> list[Requirement]:
    """The requirements of a file of the template, without comments and hashes."""
    lines = (TEMPLATE / name).read_text().replace("\\\n", " ").splitlines()
    texts = [re.sub(r"(^|\s)#.*|--hash=\S+", "", line).strip() for line in lines]
    return [Requirement(text) for text in texts if text]


@pytest.fixture(scope="module")
def locked() -> dict[str, Version]:
    """Package -> version that a TPU host gets."""
    found = {}
    for requirement in requirements("requirements.lock"):
        if requirement.marker is None or requirement.marker.evaluate(host()):
            (specifier,) = requirement.specifier
            assert specifier.operator == "=="
            assert requirement.name not in found
            found[requirement.name] = Version(specifier.version)
    return found


def test_the_lock_satisfies_every_requirement(locked: dict[str, Version]) -> None:
    for requirement in requirements("requirements.in"):
        assert locked[requirement.name] in requirement.specifier


def test_ray_jax_and_libtpu_are_the_ones_that_were_tested_together(locked: dict[str, Version]) -> None:
    versions = {name: str(locked[name]) for name in ["maxtext", "ray", "jax", "jaxlib", "libtpu"]}
    assert versions == {"maxtext": "0.2.5", "ray": "2.60.0", "jax": "0.11.1", "jaxlib": "0.11.1", "libtpu": "0.0.46"}


def test_every_locked_package_has_a_hash() -> None:
    text = (TEMPLATE / "requirements.lock").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            assert "--hash=sha256:" in line, line


def test_only_linux_asks_for_libtpu() -> None:
    (libtpu,) = [r for r in requirements("requirements.lock") if r.name == "libtpu"]
    assert libtpu.marker
    assert not libtpu.marker.evaluate(host(sys_platform="darwin", platform_machine="arm64"))


def test_the_locks_name_no_index_but_pypi() -> None:
    assert "://" not in (TEMPLATE / "requirements.lock").read_text()
    hosts = {urlsplit(url).hostname for url in re.findall(r'https?://[^"\s]+', (ROOT / "uv.lock").read_text())}
    assert hosts == {"pypi.org", "files.pythonhosted.org"}


def test_the_development_lock_has_every_development_package() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    found = {
        p["name"]: p["version"] for p in tomllib.loads((ROOT / "uv.lock").read_text())["package"] if "version" in p
    }
    for requirement in map(Requirement, wanted):
        assert found[requirement.name] in requirement.specifier
