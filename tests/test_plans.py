"""The table of plans against the compiler that made it."""

import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_rows_of_the_table_come_out_again(run_python: Path) -> None:
    done = subprocess.run(
        [run_python, ROOT / "tools/plans.py", "--spot-check", "2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
