"""Real rehearsals of generated repositories, and the rules by which they are scaled down.

The rehearsals run the real Ray, JaxTrainer, MaxText and Orbax on simulated hosts; each wants both cores for minutes, so
they share this file, which pytest-xdist gives to one worker (`--dist loadfile`).
"""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Render

TIMEOUT_SECONDS = 1500
KINDS: dict[str, dict[str, Any]] = {
    "multi-host": {},
    # Multi-head latent attention, and experts after dense layers.
    "single-host": {"generation": "v5p", "topology": "2x2x1", "model": "deepseek2-16b"},
    "multi-slice": {"generation": "v5p", "topology": "2x2x2", "num_slices": 2, "model": "gemma3-4b"},
    "moe": {"generation": "tpu7x", "topology": "2x2x2", "model": "qwen3-30b-a3b"},
}
# What each simulated slice must look like, from the facts: hosts and JAX devices of all slices.
HOSTS_AND_DEVICES = {"multi-host": (4, 16), "single-host": (1, 4), "multi-slice": (4, 16), "moe": (2, 16)}


def rehearse(folder: Path, run_python: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Rehearse in a rendered repository; return exit code, what was printed, and the report (empty if none)."""
    done = subprocess.run(
        [run_python, "-m", "ops.rehearse", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    report = folder / "build" / "rehearsal" / "report.json"
    return done.returncode, done.stdout, json.loads(report.read_text()) if report.exists() else {}


def free_port() -> int:
    """Return a TCP port that nothing uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started_here(folder: Path) -> list[str]:
    """Return the processes of this machine that work in or for `folder`."""
    listed = subprocess.run(["ps", "-eo", "args"], check=True, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line and "pytest" not in line]


@pytest.mark.sweep
@pytest.mark.rehearsal
def test_an_elastic_run_goes_on_without_a_lost_slice_and_takes_it_back_in(render: Render, run_python: Path) -> None:
    folder = render(**KINDS["multi-slice"], min_slices=1)
    code, printed, report = rehearse(folder, run_python, "--lose-slice")
    assert code == 0, printed
    (start,) = report["starts"]
    assert [attempt["devices"] for attempt in start["attempts"]] == [16, 8, 16]
    # What all slices go on from is a checkpoint that fewer have written.
    _, fewer, grown = start["attempts"]
    assert grown["steps"][0] > fewer["steps"][0]
    assert not started_here(folder)


def test_a_run_that_needs_all_slices_cannot_rehearse_the_loss_of_one(render: Render, run_python: Path) -> None:
    code, printed, _ = rehearse(render(**KINDS["multi-slice"]), run_python, "--lose-slice")
    assert code == 1
    assert "min_slices=1" in printed


@pytest.mark.rehearsal
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_job_trains_checkpoints_and_resumes(kind: str, render: Render, run_python: Path) -> None:
    folder = render(**KINDS[kind])
    code, printed, report = rehearse(folder, run_python)
    assert code == 0, printed
    assert report["passed"]
    first, second = report["starts"]
    hosts, devices = HOSTS_AND_DEVICES[kind]
    assert len(first["placed"]) == hosts
    assert first["attempts"][0]["devices"] == devices
    assert [step["step"] for step in first["steps"]] == list(range(8))
    assert [step["step"] for step in second["steps"]] == list(range(8, 12))
    assert first["steps"][-1]["loss"] < first["steps"][0]["loss"]
    assert not started_here(folder)


@pytest.mark.rehearsal
def test_a_killed_worker_costs_only_the_steps_since_its_last_checkpoint(render: Render, run_python: Path) -> None:
    folder = render(generation="v5p", topology="2x2x2", model="qwen3-0.6b")
    code, printed, report = rehearse(folder, run_python, "--lose-worker")
    assert code == 0, printed
    (start,) = report["starts"]
    steps = [step["step"] for step in start["steps"]]
    assert steps[-1] == 11
    # The numbers jump back once: to the step after the checkpoint of step 4.
    assert [after for before, after in itertools.pairwise(steps) if after <= before] == [5]


@pytest.fixture
def another_ray(run_python: Path) -> Iterator["subprocess.Popen[str]"]:
    """A Ray of the user's own on this machine, as `ray start` makes it."""
    # Unix sockets take 107 characters: pytest's own folders are too deep for them.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        command = ["start", "--head", "--block", "--port=0", "--num-cpus=0", "--include-dashboard=false"]
        process = subprocess.Popen(
            [run_python.parent / "ray", *command, f"--temp-dir={folder}", f"--ray-client-server-port={free_port()}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        started = any("Ray runtime started" in line for line in process.stdout)
        assert started, "ray start did not start"
        yield process
        # The leader of its own session: nothing but this Ray is in it.
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.mark.rehearsal
def test_an_interrupted_rehearsal_leaves_nothing_behind_and_another_ray_alone(
    render: Render, run_python: Path, another_ray: "subprocess.Popen[str]"
) -> None:
    folder = render()
    process = subprocess.Popen(
        [run_python, "-m", "ops.rehearse"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log = folder / "build" / "rehearsal" / "train-1.log"
    deadline = time.monotonic() + 300
    while not (log.exists() and "RayTrainWorker" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(1)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 130, printed
    assert "interrupted" in printed
    assert "Traceback" not in printed
    assert not started_here(folder)
    assert another_ray.poll() is None


TRUTH = """
import dataclasses, os, subprocess, sys
import yaml
from ops import rehearse, run_env, small_model
from ops.simulated_slice import SimulatedSlices
run = dataclasses.replace(run_env.load(), max_failures=0)
rehearse.FOLDER.mkdir(parents=True)
rehearse.write_data(rehearse.FOLDER / "data", run.num_hosts, 1)
settings, _ = rehearse.overrides(run, yaml.safe_load(open("config/train.yml")))
environment = rehearse.worker_environment(run)
with SimulatedSlices(run) as slices:
    slices.start_head()
    slices.start_hosts(environment)
    for name, promised, steps in [
        ("data", run, 100_000),
        ("devices", dataclasses.replace(run, devices_per_host=3, devices_per_slice=3), 2),
    ]:
        rehearse.write_run_env(promised, rehearse.FOLDER / "run.env")
        done = subprocess.run(
            [sys.executable, "train.py", *settings, f"steps={steps}", "enable_checkpointing=false"],
            env=os.environ | environment | {
                "RUN_ENV": str(rehearse.FOLDER / "run.env"),
                "RAY_STORAGE_PATH": str(rehearse.FOLDER / "ray"),
                "RAY_ADDRESS": slices.address,
            },
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        print(name, done.returncode, done.stdout)
"""


@pytest.mark.rehearsal
def test_the_exit_code_tells_of_data_that_ran_out_and_of_missing_devices(render: Render, run_python: Path) -> None:
    printed = call(render(generation="v5e", topology="2x2", model="qwen3-0.6b"), run_python, TRUTH)
    data, devices = printed.split("\ndevices ", 1)
    assert data.startswith("data 1 ")
    assert re.search(r"^error: the data ran out after \d+ of 100000 steps: give more of it", data, re.MULTILINE), data
    assert devices.startswith("1 ")
    assert "sees 4 of its devices and 4 in all, but run.env promises 3 and 3" in devices


def call(folder: Path, run_python: Path, code: str) -> str:
    """Run `code` with the rendered repository's ops in its Python and return what it prints."""
    done = subprocess.run([run_python, "-c", code], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


SCALED = """
from ops import rehearse, run_env
run, notices = rehearse.scaled(run_env.load(), {cores}, {gib})
names = run.ray_pod_type, run.gke_tpu_env
print(run.topology, run.num_slices, run.hosts_per_slice, run.num_devices, *names, len(notices))
"""


@pytest.mark.parametrize(
    ("answers", "cores", "gib", "expected"),
    [
        ({}, 2, 20, "4x4 1 4 16 v6e-16 v6e-16 0"),
        ({"topology": "16x16"}, 2, 20, "4x4 1 4 16 v6e-16 v6e-16 1"),
        ({"topology": "4x8"}, 4, 20, "4x8 1 8 32 v6e-32 v6e-32 0"),
        ({"topology": "2x4"}, 2, 20, "2x4 1 1 8 v6e-8 v6e-8 0"),
        ({"generation": "v5p", "topology": "8x8x8"}, 2, 20, "2x2x2 1 2 8 v5p-16 v5p-16 1"),
        ({"generation": "v5e", "topology": "8x16", "num_slices": 2}, 2, 20, "4x4 2 4 32 v5litepod-16 v5litepod-16 1"),
        ({"generation": "tpu7x", "topology": "4x4x4", "num_slices": 3}, 2, 20, "2x2x2 3 2 48 v7x-16 tpu7x-16 1"),
    ],
)
def test_a_large_slice_is_rehearsed_on_fewer_hosts_but_never_on_one(
    answers: dict[str, Any], cores: int, gib: int, expected: str, render: Render, run_python: Path
) -> None:
    assert call(render(**answers), run_python, SCALED.format(cores=cores, gib=gib)) == expected


def test_a_machine_that_is_too_small_is_told_how_much_it_takes(render: Render, run_python: Path) -> None:
    folder = render(topology="4x8", num_slices=4)
    done = subprocess.run(
        [run_python, "-c", SCALED.format(cores=2, gib=8)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert "RehearsalError: 4 x v6e 4x4 needs 16 simulated hosts" in done.stderr


@pytest.mark.parametrize(
    ("parallelism", "devices", "expected"),
    [
        ("fsdp=-1", 16, {"fsdp": -1}),
        ("fsdp=64,tensor=4", 16, {"fsdp": 4, "tensor": 4}),
        ("fsdp=-1,tensor=8", 4, {"fsdp": -1, "tensor": 4}),
    ],
)
def test_the_mesh_shrinks_with_the_slice(
    parallelism: str, devices: int, expected: dict[str, int], render: Render, run_python: Path
) -> None:
    folder = render(topology="16x16", ici_parallelism=parallelism)
    printed = call(
        folder,
        run_python,
        "import json, yaml; from ops.small_model import small_mesh\n"
        f"print(json.dumps(small_mesh(yaml.safe_load(open('config/train.yml')), {devices})))",
    )
    assert json.loads(printed) == {f"ici_{axis}_parallelism": size for axis, size in expected.items()}


def test_the_trainer_refuses_what_is_no_override(render: Render, run_python: Path) -> None:
    done = subprocess.run(
        [run_python, "train.py", "steps"], cwd=render(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stdout.strip() == "error: 'steps' is no override: give key=value, e.g. steps=200"


def test_the_trainer_names_a_key_that_run_env_lacks(render: Render, run_python: Path) -> None:
    folder = render()
    run_env = folder / "run.env"
    run_env.write_text("".join(line for line in run_env.open() if not line.startswith("TOPOLOGY=")))
    done = subprocess.run(
        [run_python, "train.py"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "has no TOPOLOGY: it is older than this code; run make update" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_driver_never_imports_jax_or_maxtext(render: Render, run_python: Path) -> None:
    code = "import sys, train; print([name for name in ('jax', 'maxtext', 'libtpu') if name in sys.modules])"
    loaded = call(render(), run_python, code)
    assert loaded == "[]"


def test_the_rehearsals_text_is_plain_ascii_and_long_enough() -> None:
    text = (ROOT / "template" / "rehearsal" / "text.txt").read_text(encoding="utf-8")
    assert text.isascii()
    assert len(text.split()) > 1000
