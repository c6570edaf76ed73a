"""`python -m ops.checkpoints` against a Cloud Storage emulator that speaks the JSON API."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cloud_storage import Emulator, environment
from tests.cloud_support import render, variant

BUCKET = "acme-tpu-data"
RUN = "pilot"
FOLDER = f"my-tpu-run/{RUN}/checkpoints"


@pytest.fixture
def bucket() -> Iterator[Emulator]:
    with Emulator(BUCKET) as emulator:
        yield emulator


def checkpoints(
    python: Path, emulator: Emulator | None, repository: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(python), "-m", "ops.checkpoints"],
        cwd=repository or render(run_name=RUN),
        env=environment(emulator),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_newest_committed_checkpoint_is_what_a_resume_takes(bucket: Emulator, run_python: Path) -> None:
    bucket.make_bucket()
    for step in (0, 20, 100):
        bucket.put(f"{FOLDER}/{step}/items/data", 11 * 2**20)
        bucket.put(f"{FOLDER}/{step}/commit_success.txt", 1)
    bucket.put(f"{FOLDER}/120/items/data", 5)
    bucket.put("my-tpu-run/other-run/checkpoints/900/commit_success.txt", 1)
    done = checkpoints(run_python, bucket)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.split() and line.split()[0].isdigit()}
    assert list(rows) == ["0", "20", "100", "120"]
    assert [step for step, row in rows.items() if "a resume takes this one" in row] == ["100"]
    assert [step for step, row in rows.items() if "not committed" in row] == ["120"]
    assert "0.01 GiB" in rows["20"]
    assert "seconds ago" in rows["20"]


def test_an_item_that_is_committed_does_not_make_the_checkpoint_whole(bucket: Emulator, run_python: Path) -> None:
    bucket.make_bucket()
    bucket.put(f"{FOLDER}/20/items/commit_success.txt", 1)
    done = checkpoints(run_python, bucket)
    assert "None is committed: a run starts at step 0." in done.stdout


def test_an_empty_folder_says_where_a_run_starts(bucket: Emulator, run_python: Path) -> None:
    bucket.make_bucket()
    done = checkpoints(run_python, bucket)
    assert done.returncode == 0, done.stderr
    assert f"No checkpoint in gs://{BUCKET}/{FOLDER}/ yet" in done.stdout


def test_a_missing_bucket_is_named_with_the_command_that_makes_it(bucket: Emulator, run_python: Path) -> None:
    done = checkpoints(run_python, bucket)
    assert done.returncode == 1
    assert done.stderr.strip() == f"error: there is no bucket gs://{BUCKET}: make infra-bucket"


def test_a_placeholder_bucket_is_refused_without_a_call(run_python: Path) -> None:
    done = checkpoints(run_python, None, variant("placeholders"))
    assert done.returncode == 1
    assert "bucket is still the placeholder 'your-bucket-name'" in done.stderr


def test_without_a_login_the_command_that_logs_in_is_named(run_python: Path) -> None:
    done = checkpoints(run_python, None)
    assert done.returncode == 1
    assert done.stderr.strip() == "error: no login for Google Cloud: gcloud auth application-default login"
