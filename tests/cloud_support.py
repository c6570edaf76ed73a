"""What the tests of the cloud half share: rendered variants, the stand-in for gcloud, and the real gcloud's parser."""

import atexit
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import copier
import yaml

TEMPLATE = Path(__file__).resolve().parent.parent
GENERATIONS: dict[str, dict[str, Any]] = {
    name: record
    for name, record in tomllib.loads((TEMPLATE / "extensions/tpu.toml").read_text()).items()
    if isinstance(record, dict)
}
GIVEN = {"project_id": "acme-tpu", "bucket": "acme-tpu-data"}

# One variant for each branch of the manifests and the scripts. test_every_branch_has_a_variant keeps it complete.
VARIANTS: dict[str, dict[str, str]] = {
    "default": {},
    "v4": {"generation": "v4", "topology": "2x2x4"},
    "v5e-single-host-8t": {"generation": "v5e", "topology": "2x4"},
    "v5e-one-chip-spot": {"generation": "v5e", "topology": "1x1", "capacity": "spot"},
    "v5p-reservation": {"generation": "v5p", "topology": "4x4x4", "capacity": "reservation", "reservation": "block-a"},
    "v6e-two-slices-spot": {"topology": "4x8", "num_slices": "2", "capacity": "spot"},
    "v6e-flex-start": {"topology": "8x8", "capacity": "flex-start", "namespace": "default"},
    "v6e-shared-reservation": {
        "capacity": "reservation",
        "reservation": "projects/other-project/reservations/res/reservationBlocks/block-1",
    },
    "v6e-autopilot-spot": {"cluster_mode": "autopilot", "capacity": "spot"},
    "v6e-autopilot-reservation": {
        "cluster_mode": "autopilot",
        "capacity": "reservation",
        "reservation": "projects/other-project/reservations/res/reservationBlocks/block-1",
    },
    "v6e-autopilot-flex-start": {"cluster_mode": "autopilot", "capacity": "flex-start"},
    "tpu7x-multi-host": {"generation": "tpu7x", "topology": "4x4x4"},
    "tpu7x-single-host": {"generation": "tpu7x", "topology": "2x2x1"},
    "tpu7x-autopilot-two-slices": {
        "generation": "tpu7x",
        "topology": "2x2x2",
        "num_slices": "2",
        "cluster_mode": "autopilot",
    },
    "v5p-elastic": {"generation": "v5p", "num_slices": "3", "min_slices": "2"},
    "placeholders": {"project_id": "your-project-id", "bucket": "your-bucket-name"},
}


@functools.cache
def _scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="copier-maxtext-ray-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def _template() -> Path:
    """Copy the template without its git history: Copier renders from a plain folder several times faster."""
    target = _scratch() / "template"
    for name in ("extensions", "template"):
        shutil.copytree(TEMPLATE / name, target / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    shutil.copy2(TEMPLATE / "copier.yml", target)
    return target


@functools.cache
def _render(items: tuple[tuple[str, str], ...]) -> Path:
    target = Path(tempfile.mkdtemp(prefix="run-", dir=_scratch()))
    copier.run_copy(str(_template()), target, data={**GIVEN, **dict(items)}, defaults=True, unsafe=True, quiet=True)
    return target


def render(**answers: str) -> Path:
    """Render the working tree of the template once for these answers; callers must not change the result."""
    return _render(tuple(sorted(answers.items())))


def variant(name: str) -> Path:
    """Render one of VARIANTS."""
    return render(**VARIANTS[name])


def run_env(repository: Path) -> dict[str, str]:
    """Read run.env."""
    lines = (repository / "run.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def kustomize(repository: Path, folder: str) -> list[dict[str, Any]]:
    """Return what kubectl would apply for k8s/<folder>."""
    return list(yaml.safe_load_all(_kustomize(repository, folder)))


@functools.cache
def _kustomize(repository: Path, folder: str) -> str:
    return subprocess.run(
        ["kubectl", "kustomize", f"k8s/{folder}"], cwd=repository, check=True, capture_output=True, text=True
    ).stdout


def raycluster(repository: Path) -> dict[str, Any]:
    """Return the RayCluster of k8s/cluster."""
    (cluster,) = kustomize(repository, "cluster")
    return cluster


def plan_lines(repository: Path, script: str = "plan", **environment: str) -> list[str]:
    """Return the command lines, each in full, that a script prints with PLAN=yes; no gcloud is on PATH for it."""
    return list(_plan_lines(repository, script, tuple(sorted(environment.items()))))


@functools.cache
def _tools() -> Path:
    """Make a folder for PATH with what the scripts use except gcloud, which a plan must not need."""
    folder = _scratch() / "tools"
    folder.mkdir()
    for tool in ("bash", "cat", "cut", "dirname", "env", "git", "grep", "tr", "tail", "cksum", "awk"):
        found = shutil.which(tool)
        assert found, tool
        (folder / tool).symlink_to(found)
    return folder


@functools.cache
def _plan_lines(repository: Path, script: str, environment: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    done = subprocess.run(
        ["bash", f"infra/{script}.sh"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": str(_tools()), "PLAN": "yes", "PYTHON": sys.executable, **dict(environment)},
    )
    return tuple(line for line in done.stdout.splitlines() if line.startswith("gcloud "))


class StandIn:
    """A rendered repository with the recording stand-in for gcloud on PATH."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self.repository = repository
        self.state = folder / "state.json"
        self.state.write_text(json.dumps({"account": "me@example.com", "calls": [], "asked": []}))
        binary = folder / "bin" / "gcloud"
        binary.parent.mkdir()
        source = TEMPLATE / "tests" / "cloud_gcloud_stand_in.py"
        binary.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S {shlex.quote(str(source))} "$@"\n')
        binary.chmod(0o755)
        self.path = f"{binary.parent}:{os.environ['PATH']}"

    def run(self, script: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run infra/<script>.sh to its end; the output is both streams."""
        return subprocess.run(
            ["bash", f"infra/{script}.sh"],
            cwd=self.repository,
            env=os.environ | {"PATH": self.path, "STAND_IN_STATE": str(self.state)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )

    @property
    def data(self) -> dict[str, Any]:
        return dict(json.loads(self.state.read_text()))

    def edit(self, **values: Any) -> None:
        """Set top-level values of the stand-in's state."""
        self.state.write_text(json.dumps(self.data | values))

    def calls(self) -> list[str]:
        """Return the changing commands so far, each as one line."""
        return [" ".join(call) for call in self.data["calls"]]

    def forget(self) -> None:
        """Forget the recorded commands and keep what they made."""
        self.edit(calls=[], asked=[])


def flags_of(line: str) -> dict[str, str]:
    """Return the flags of a command line; a repeated flag is an error of the line."""
    flags: dict[str, str] = {}
    for word in shlex.split(line):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            assert name not in flags, f"{name} is given twice in: {line}"
            flags[name] = value
    return flags


def all_topologies() -> Iterator[tuple[str, str]]:
    """Yield every generation with each of its topologies."""
    for generation, record in GENERATIONS.items():
        for topology in record["topologies"]:
            yield generation, topology
