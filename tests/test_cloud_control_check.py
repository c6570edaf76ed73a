"""make doctor's look at Google Cloud through the infra scripts, and profile and goodput, without a cluster."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cloud_storage import Emulator, environment
from tests.cloud_support import StandIn, render, variant
from tests.conftest import Render

STEPS = ["apis", "accounts", "registry", "bucket", "cluster", "node-pools", "access", "image"]


def lines(printed: str, mark: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith(mark)]


@pytest.mark.parametrize("name", ["default", "v6e-two-slices-spot", "tpu7x-multi-host"])
def test_a_check_changes_nothing_and_tells_what_is_missing_and_what_is_there(name: str, tmp_path: Path) -> None:
    cloud = StandIn(variant(name), tmp_path)
    for step in STEPS:
        printed = cloud.run(step, CHECK="yes").stdout
        assert lines(printed, "missing: "), (step, printed)
        assert not lines(printed, "there: "), (step, printed)
        assert not lines(printed, "make: "), (step, printed)
    assert cloud.calls() == []

    assert cloud.run("all").returncode == cloud.run("image").returncode == 0
    cloud.forget()
    for step in STEPS:
        done = cloud.run(step, CHECK="yes")
        assert done.returncode == 0, done.stdout
        assert lines(done.stdout, "there: "), (step, done.stdout)
        assert not lines(done.stdout, "missing: "), (step, done.stdout)
    assert cloud.calls() == []


def test_a_pool_in_state_error_is_no_slice(tmp_path: Path) -> None:
    cloud = StandIn(variant("default"), tmp_path)
    assert cloud.run("all").returncode == 0
    pools = cloud.data["resources"]["pools"]
    cloud.edit(resources=cloud.data["resources"] | {"pools": dict.fromkeys(pools, "ERROR")}, calls=[])
    assert lines(cloud.run("node-pools", CHECK="yes").stdout, "missing: it is in state ERROR: node pool v6e-4x4")
    assert cloud.calls() == []


def test_doctor_prints_one_line_a_check_with_the_next_command_and_goes_on_after_a_failure(
    tmp_path: Path, run_python: Path
) -> None:
    cloud = StandIn(variant("default"), tmp_path)
    for tool in ("kubectl", "gke-gcloud-auth-plugin"):
        (tmp_path / "bin" / tool).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "bin" / tool).chmod(0o755)
    for step in ("apis", "accounts", "registry", "bucket"):
        assert cloud.run(step).returncode == 0
    plain = environment() | {"STAND_IN_STATE": str(cloud.state), "KUBECONFIG": str(tmp_path / "none")}
    done = subprocess.run(
        [run_python, "-m", "ops.doctor"],
        cwd=cloud.repository,
        env=plain | {"PATH": f"{tmp_path / 'bin'}:{plain['PATH']}"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 1
    assert done.stderr == ""
    found = {
        match[2].strip(): match[1] for match in re.finditer(r"^(pass|FAIL|  - ) (.{16})", done.stdout, re.MULTILINE)
    }
    passed = {"tools", "answers", "APIs", "your roles", "accounts", "registry", "bucket"}
    assert {name for name, mark in found.items() if mark == "pass"} >= passed
    assert {name for name, mark in found.items() if mark == "FAIL"} == {
        "login", "pods' access", "image", "GKE cluster", "kubectl"
    }  # fmt: skip
    for step in ("gcloud auth application-default login", "make infra-access", "make image", "make infra-cluster"):
        assert f"next: {step}" in done.stdout, done.stdout
    assert "not checked: GKE cluster comes first" in done.stdout
    assert "kubectl knows no cluster 'gke_acme-tpu_us-east5-b_my-tpu-run': make infra-credentials" in done.stdout
    assert not cloud.calls()[-1].startswith("container")


def module(python: Path, folder: Path, emulator: Emulator | None, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [python, "-m", *arguments],
        cwd=folder,
        env=environment(emulator),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stdout
    return done.returncode, done.stdout


def test_the_newest_profile_is_fetched_with_how_to_look_at_it(render: Render, run_python: Path) -> None:
    folder = render(project_id="acme-tpu", bucket="acme-tpu-data", run_name="pilot")
    place = "my-tpu-run/pilot-profile/tensorboard/plugins/profile"
    with Emulator("acme-tpu-data") as bucket:
        bucket.make_bucket()
        code, printed = module(run_python, folder, bucket, "ops.profile", "--view")
        assert code == 1
        assert (
            "there is no profile in gs://acme-tpu-data/my-tpu-run/pilot-profile/tensorboard/ yet: make profile"
            in printed
        )
        bucket.put(f"{place}/2026_11_29_10_00_00/host.xplane.pb", 3)
        bucket.put(f"{place}/2026_11_30_10_00_00/host.xplane.pb", 5)
        code, printed = module(run_python, folder, bucket, "ops.profile", "--view")
    assert code == 0, printed
    assert "xprof server --logdir=build/profile" in printed
    fetched = [path for path in (folder / "build" / "profile").rglob("*") if path.is_file()]
    assert [(path.parent.name, path.stat().st_size) for path in fetched] == [("2026_11_30_10_00_00", 5)]


def test_a_profile_is_a_run_of_its_own_that_leaves_the_checkpoints_alone(run_python: Path) -> None:
    code = "from ops import run_env, submit; print(*submit.profile_overrides(run_env.load(), 3), sep='\\n')"
    printed = subprocess.check_output([run_python, "-c", code], cwd=render(run_name="pilot"), text=True)
    settings = dict(line.split("=", 1) for line in printed.split())
    assert settings == {
        "run_name": "pilot-profile",
        "enable_checkpointing": "false",
        "profiler": "xplane",
        "skip_first_n_steps_for_profiler": "5",
        "profiler_steps": "3",
        "steps": "9",
    }
    # MaxText knows every one of them.
    base = subprocess.check_output(
        [
            run_python,
            "-c",
            "import pathlib, importlib.util as u; print(pathlib.Path(u.find_spec('maxtext').origin).parent)",
        ],
        text=True,
    ).strip()
    known = yaml.safe_load(Path(base, "configs", "base.yml").read_text())
    assert set(settings) <= set(known)
    assert {"enable_goodput_recording", "goodput_job_name"} <= set(known)


def test_goodput_says_how_to_turn_recording_on_and_that_a_login_is_missing(render: Render, run_python: Path) -> None:
    folder = render(project_id="acme-tpu", bucket="acme-tpu-data")
    code, printed = module(run_python, folder, None, "ops.goodput")
    assert code == 1
    assert "enable_goodput_recording: true" in printed
    assert "roles/logging.logWriter" in printed
    with (folder / "config" / "train.yml").open("a") as config:
        config.write("enable_goodput_recording: true\n")
    code, printed = module(run_python, folder, None, "ops.goodput")
    assert code == 1
    assert printed.strip().endswith("no login for Google Cloud: gcloud auth application-default login")


def test_the_report_of_goodput_names_the_largest_losses_first(run_python: Path) -> None:
    code = (
        "from ops.goodput import lines\n"
        "from ml_goodput_measurement.src.goodput_utils import BadputType\n"
        "badput = {BadputType.TPU_INITIALIZATION: 2.0, BadputType.OTHER: 0.0}\n"
        "badput[BadputType.CUSTOM_BADPUT_EVENTS] = {'EVAL': 5.0}\n"
        "print(*lines(93.0, badput, 41), sep='\\n')"
    )
    printed = subprocess.check_output(
        [run_python, "-c", code], cwd=render(), text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"}
    )
    assert printed.splitlines() == [
        "goodput 93.0 % of the time since the first start, at step 41",
        "    5.0 %  custom badput events: EVAL",
        "    2.0 %  tpu initialization",
    ]
