"""The TPU compiler and its flags, before anything is compiled: which libtpu is here, and whether it takes the flags.

libtpu ends the process that loads it with a wrong flag, so the check runs in a process of its own; it needs no TPU.
Standard library only: train.py uses it too.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS_FILE = ROOT / "config" / "libtpu.flags"
# The compiled step for the run, and beside it what it was compiled from.
KEPT_STEP = ROOT / "config" / "compiled" / "train_step.bin"
PACKAGES = ("maxtext", "jax", "jaxlib", "libtpu")
CHECK_SECONDS = 180  # it takes 5 to 10; a busy machine longer

# Loads libtpu and compiles one matrix product for one host of the generation.
_PROBE = """
import sys
import jax
from jax.experimental.topologies import get_topology_desc
from jax.sharding import SingleDeviceSharding
bounds = tuple(map(int, sys.argv[2].split("x")))
device = get_topology_desc(
    platform="tpu", topology_name=sys.argv[1], chips_per_host_bounds=bounds, chip_config_name=sys.argv[3]
).devices[0]
square = jax.ShapeDtypeStruct((256, 256), "bfloat16", sharding=SingleDeviceSharding(device))
jax.jit(lambda x: x @ x).lower(square).compile()
print("accepted")
"""
# libtpu's name of the smallest slice of each generation, a host's chips in it, and its chip configuration: as MaxText's
# accelerator_to_spec_map has them.
_SMALLEST = {
    "v4": ("v4:2x2x1", "2x2x1", "megacore"),
    "v5e": ("v5e:2x2", "2x2x1", "default"),
    "v5p": ("v5:2x2x1", "2x2x1", "megacore"),
    "v6e": ("v6e:2x2", "2x2x1", "default"),
    "tpu7x": ("tpu7x:2x2x1", "2x2x1", "default"),
}


def read_flags(file: Path = FLAGS_FILE) -> list[str]:
    """Return the flags of `file`, one a line; lines that begin with # are comments."""
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def versions() -> dict[str, str]:
    """Return the installed versions of what decides about a compiled step; a package that is absent is left out."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def missing() -> str:
    """Return why the TPU compiler cannot run here and what to do, empty when it can."""
    if "libtpu" in versions():
        return ""
    here = f"{platform.system()} {platform.machine()}"
    if here != "Linux x86_64":
        return (
            f"the TPU compiler (libtpu) exists for Linux x86_64 only, and this is {here}: run it in a container, "
            "docker run --rm -it --platform linux/amd64 -v .:/work -w /work python:3.12-slim "
            "sh -c 'apt-get update && apt-get install -y make && make preflight VENV=/tmp/venv'"
        )
    return "the TPU compiler (the package libtpu) is not installed here: run `make setup`"


def environment(flags: list[str]) -> dict[str, str]:
    """Return the environment of a process that compiles for TPUs without having one."""
    return {
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": " ".join(flags),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process on this machine fails on libtpu's lock file
        "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask, and asking waits
        "DECOUPLE_GCLOUD": "TRUE",  # MaxText's own switch for machines without Google Cloud; halves its import
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def refused_flags(log: str) -> str:
    """Return what libtpu's output says against the flags, as one message; empty when it says nothing."""
    if misplaced := re.search(r"Unknown flags? in XLA_FLAGS: (.+)", log):
        return (
            f"XLA_FLAGS holds {misplaced[1].strip()}, which only libtpu knows, and XLA ends the process over it: "
            "unset it there and put the flag into config/libtpu.flags"
        )
    unknown = re.findall(r"ERROR: Unknown command line flag '([^']+)'", log)
    illegal = re.findall(r"ERROR: Illegal value '([^']*)' specified for flag '([^']+)'", log)
    if unknown or illegal:
        points = [f"it does not know --{name}" for name in dict.fromkeys(unknown)]
        points += [f"'{value}' is no value of --{name}" for value, name in dict.fromkeys(illegal)]
        return (
            f"libtpu {versions().get('libtpu', '')} refuses the flags of config/libtpu.flags: {'; '.join(points)}. "
            "Remove or correct them there"
        )
    if fusion := re.search(r"FAILED_PRECONDITION: ((?:Continuation fusion for (\w+)).*?)(?:\n|$)", log):
        part = {"AllGather": "all_gather", "AllReduce": "all_reduce", "ReduceScatter": "reduce_scatter"}.get(fusion[2])
        return (
            f"libtpu {versions().get('libtpu', '')} no longer compiles async collective fusion of {fusion[2]} for this "
            f"generation: in config/libtpu.flags, set --xla_tpu_enable_async_collective_fusion_fuse_{part}=false or "
            "remove --xla_tpu_enable_async_collective_fusion=true"
        )
    return ""


def check_flags(flags: list[str], generation: str, python: str = sys.executable) -> str:
    """Return why libtpu refuses `flags`, empty when it takes them. Takes 5 to 10 s, and at most CHECK_SECONDS."""
    if stray := [flag for flag in flags if not re.fullmatch(r"--\w+(=\S+)?", flag)]:
        return f"config/libtpu.flags has '{stray[0]}', which is no flag: each line is --name=value"
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, *_SMALLEST[generation]],
            env=os.environ | environment(flags),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"libtpu did not answer within {CHECK_SECONDS} s whether it takes the flags: is this machine overloaded?"
    if done.returncode == 0:
        return ""
    last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), f"exit code {done.returncode}")
    return refused_flags(done.stdout) or f"the TPU compiler does not start with these flags: {last.strip()}"


def fingerprint(config: str, overrides: list[str], flags: list[str], compile_topology: str, num_slices: int) -> str:
    """Return a name for what makes a step besides versions: the config's text, overrides, flags and slices.

    MaxText also takes M_KEY from the environment for its key.
    """
    environment = {name: value for name, value in os.environ.items() if name.startswith("M_")}
    parts = [config, sorted(overrides), flags, compile_topology, num_slices, environment]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def note_kept_step(name: str, file: Path = KEPT_STEP) -> None:
    """Write beside a kept step what it was compiled from: its fingerprint `name` and the versions."""
    text = json.dumps({"fingerprint": name, "versions": versions()}, indent=1) + "\n"
    file.with_suffix(".json").write_text(text, encoding="utf-8")


def kept_step(name: str, file: Path = KEPT_STEP) -> tuple[str, str]:
    """Return the path of the kept step if it is that of fingerprint `name`, else "" and why it is not used."""
    note = file.with_suffix(".json")
    if not file.exists() or not note.exists():
        return "", ""
    then = json.loads(note.read_text(encoding="utf-8"))
    now = versions()
    again = "compile it again with `make preflight ARGS=--keep`"
    changed = [
        f"{package} {then['versions'].get(package)} then, {now.get(package)} now"
        for package in PACKAGES
        if then["versions"].get(package) != now.get(package)
    ]
    if changed:
        return "", f"the kept step is not used, it was compiled with other versions ({'; '.join(changed)}): {again}"
    if then["fingerprint"] != name:
        return "", f"the kept step is not used, since configuration, flags or slices have changed: {again}"
    return str(file), ""
