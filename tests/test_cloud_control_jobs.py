"""Submitting, following and stopping a run through Ray's job API, against a real Ray head with a token."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cloud_ray import PROGRAM, RayHead, Way
from tests.cloud_storage import Emulator
from tests.conftest import Render


@pytest.fixture(scope="module")
def ray_head(run_python: Path) -> Iterator[RayHead]:
    with RayHead(run_python) as head:
        yield head


@pytest.fixture
def repository(render: Render, run_python: Path, tmp_path: Path) -> Path:
    """A generated repository whose entrypoint is a program that only prints what a run prints."""
    folder = render(project_id="acme-tpu", bucket="acme-tpu-data", run_name="pilot")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    rayjob = folder / "k8s" / "job" / "rayjob.yaml"
    rayjob.write_text(re.sub("entrypoint: .*", f"entrypoint: {run_python} {program}", rayjob.read_text()))
    return folder


SUBMIT = """
import sys
from ops import manifests, run_env, runs, terminal
from ops.ray_jobs import Jobs

def main():
    run = run_env.load()
    jobs = Jobs(sys.argv[1], sys.argv[2])
    submission_id = jobs.submit(run.run_name, [*manifests.entrypoint(), *sys.argv[3:]])
    print("submitted", submission_id, flush=True)
    return runs.follow(run, jobs, submission_id)

terminal.run(main)
"""


def start(python: Path, repository: Path, code: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [python, "-c", code, *arguments],
        cwd=repository,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: "subprocess.Popen[str]") -> tuple[int, str]:
    printed, _ = process.communicate(timeout=400)
    assert "Traceback" not in printed
    return process.returncode, printed


def submitted(process: "subprocess.Popen[str]") -> str:
    """Wait for the submission; return its id."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("submitted "):
            return line.split()[1]
    raise AssertionError("nothing was submitted")


def steps_in(repository: Path, submission_id: str) -> list[int]:
    text = (repository / "build" / "runs" / f"{submission_id}.log").read_text()
    assert text.endswith("the last line has no end\n")
    return [int(step) for step in re.findall(r"^completed step: (\d+),", text, re.MULTILINE)]


def wait_for(condition: "subprocess.Popen[str] | None", path: Path, text: str, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"no '{text}' in {path}"
        assert condition is None or condition.poll() is None
        time.sleep(0.1)


def test_a_dropped_connection_costs_no_line_and_no_second_run_and_the_exit_code_is_the_runs_own(
    ray_head: RayHead, repository: Path, run_python: Path, tmp_path: Path
) -> None:
    way, hold = Way(ray_head.port), tmp_path / "go-on"
    address = f"http://127.0.0.1:{way.port}"
    process = start(run_python, repository, SUBMIT, address, ray_head.token, "steps=40", f"hold={hold}", "code=3")
    submission_id = submitted(process)
    log = repository / "build" / "runs" / f"{submission_id}.log"
    wait_for(process, log, "completed step: 19,")
    way.cut()
    time.sleep(3)
    hold.touch()  # the run goes on while nobody listens
    time.sleep(3)
    before = way.connections
    way.open()
    code, printed = end(process)
    assert code == 3, printed
    assert way.connections > before
    assert "connection lost, the run goes on; connecting again" in printed
    assert steps_in(repository, submission_id) == list(range(40))
    assert f"{submission_id} failed with code 3. All of its log: build/runs/{submission_id}.log" in printed
    assert "make resume goes on from the newest checkpoint" in printed
    way.cut()

    ids = start(run_python, repository, LIST, ray_head.address, ray_head.token)
    assert end(ids)[1].split() == [submission_id]


LIST = """
import sys
from ops.ray_jobs import Jobs
print(*(job.submission_id for job in Jobs(sys.argv[1], sys.argv[2]).every()))
"""

STOP = """
import sys
from ops import terminal
from ops.ray_jobs import Jobs

def main():
    jobs = Jobs(sys.argv[1], sys.argv[2])
    print(jobs.stop(jobs.running()).status.value)
    return 0

terminal.run(main)
"""


def test_ctrl_c_leaves_the_run_going_a_second_is_refused_and_stop_ends_it(
    ray_head: RayHead, repository: Path, run_python: Path, tmp_path: Path
) -> None:
    way = ray_head.address, ray_head.token
    process = start(run_python, repository, SUBMIT, *way, "steps=40", f"hold={tmp_path / 'never'}")
    submission_id = submitted(process)
    wait_for(process, repository / "build" / "runs" / f"{submission_id}.log", "completed step: 19,")
    process.send_signal(signal.SIGINT)
    code, printed = end(process)
    assert code == 130
    assert f"{submission_id} goes on without you: make status follows it, make stop ends it" in printed
    # 16 devices, 459 of 918 TFLOP/s, 39 steps of 1.1 s to go; without a terminal only some steps are shown.
    assert "step 1/40  loss 10.000  59,602 tokens/s  MFU 50.0 %  43 s left" in printed

    code, printed = end(start(run_python, repository, SUBMIT, *way))
    assert code == 1
    assert printed.strip() == f"error: {submission_id} is running: make status follows it, make stop ends it"

    code, printed = end(start(run_python, repository, STOP, *way))
    assert (code, printed.strip()) == (0, "STOPPED")


def test_a_run_that_succeeds_ends_with_zero_and_says_what_still_bills(
    ray_head: RayHead, repository: Path, run_python: Path
) -> None:
    process = start(run_python, repository, SUBMIT, ray_head.address, ray_head.token, "steps=3")
    code, printed = end(process)
    assert code == 0, printed
    submission_id = re.findall(r"^submitted (\S+)$", printed, re.MULTILINE)[0]
    assert steps_in(repository, submission_id) == [0, 1, 2]
    assert f"{submission_id} is done. make checkpoints lists what it saved." in printed
    assert "The TPU node pools bill whether or not anything runs on them" in printed


def test_a_wrong_token_and_a_run_that_the_head_does_not_know_are_told_plainly(
    ray_head: RayHead, repository: Path, run_python: Path
) -> None:
    code, printed = end(start(run_python, repository, SUBMIT, ray_head.address, "0" * 32))
    assert code == 1
    assert printed.strip() == "error: the Ray head refuses the token: make doctor compares it"
    gone = SUBMIT.replace("jobs.submit(run.run_name, [*manifests.entrypoint(), *sys.argv[3:]])", "'pilot-99'")
    code, printed = end(start(run_python, repository, gone, ray_head.address, ray_head.token))
    assert code == 1
    assert "Ray's head does not know this run any more: it was restarted. make resume goes on" in printed


RESUME = """
import os, sys
from ops import run_env, submit, terminal
from ops.ray_jobs import Jobs

def main():
    print("overrides", submit.resumed(run_env.load(), Jobs(sys.argv[1], sys.argv[2]), sys.argv[3:]))
    return 0

terminal.run(main)
"""


def test_a_resume_names_its_checkpoint_and_repeats_the_arguments_of_the_last_run(
    ray_head: RayHead, repository: Path, run_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = ray_head.address, ray_head.token
    assert end(start(run_python, repository, SUBMIT, *way, "steps=6"))[0] == 0
    with Emulator("acme-tpu-data") as bucket:
        bucket.make_bucket()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.address)
        printed = end(start(run_python, repository, RESUME, *way))[1]
        assert "note: as pilot-" in printed
        assert "overrides ['steps=6']" in printed
        assert (
            "no committed checkpoint in gs://acme-tpu-data/my-tpu-run/pilot/checkpoints/: the run starts at" in printed
        )
        bucket.put("my-tpu-run/pilot/checkpoints/5/commit_success.txt", 1)
        code, printed = end(start(run_python, repository, RESUME, *way, "steps=20"))
        assert code == 0
        assert (
            "takes checkpoint 5 in gs://acme-tpu-data/my-tpu-run/pilot/checkpoints/ and goes on with step 6 of 20"
            in printed
        )
        code, printed = end(start(run_python, repository, RESUME, *way))
        assert code == 1
        assert "all 6 steps are done, checkpoint 5 is the last: give more, e.g. ARGS=steps=12" in printed


def test_f19_the_machine_of_the_user_needs_no_ray_command_line(repository: Path) -> None:
    """The tutorial's `ray` command breaks with newer versions of click; every command here calls Ray's Python API."""
    text = (repository / "Makefile").read_text() + "".join(path.read_text() for path in repository.glob("ops/*.py"))
    assert not re.search(r"ray job |\bray (start|submit|list)\b(?!`)|\"ray\", ", text.replace("`ray start`", ""))
    job = yaml.safe_load((repository / "k8s" / "job" / "rayjob.yaml").read_text())
    assert job["spec"]["submissionMode"] == "K8sJobMode"
