"""The sweep of plans: the order of its search, and the table against the compiler that made it."""

import importlib
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT

# It extends the import path itself, which a type checker does not follow.
plans: Any = importlib.import_module("tools.plans")


def row(hbm_gib: str, problem: str = "") -> dict[str, Any]:
    return {"hbm_gib": hbm_gib, "problem": problem, "generation": "v5p"}


def test_the_first_guess_leaves_room_and_the_second_stands_on_its_size() -> None:
    job = plans.Job("llama3-8b", "v5p", "2x2x2", 1)
    usable = plans.facts.usable_gib("v5p")
    state = plans.facts.state_gib(*job[:3])
    first = plans.next_batch(job, "recompute", {}, 3)
    first_gib, next_gib = (plans.facts.estimated_gib(*job[:3], b, recipe="recompute") for b in (first, first + 1))
    assert first_gib <= plans.FIRST_GUESS * usable < next_gib
    rows = {4.0: row(f"{state + 4 * 9:.2f}")}  # 9 GiB a sequence
    assert plans.next_batch(job, "recompute", rows, 3) == (usable - state) // 9
    too_large = rows | {9.0: row("93.10")}  # compiles, but into the headroom
    assert plans.next_batch(job, "recompute", too_large, 3) == 8
    assert plans.next_batch(job, "recompute", too_large, 2) is None


def test_half_of_a_batch_without_a_size_comes_next_and_other_problems_end_the_search() -> None:
    job = plans.Job("llama3-8b", "v5p", "2x2x2", 1)
    assert plans.next_batch(job, "recompute", {12.0: row("", "hbm")}, 3) == 6
    assert plans.next_batch(job, "recompute", {1.0: row("", "hbm")}, 3) is None
    assert plans.next_batch(job, "recompute", {12.0: row("", "unknown flag")}, 3) is None


# A job that the table lacks until a long sweep has run.
MISSING = ["--only", "llama3.1-405b on 1 x v5p", "--recipe", "recompute", "--tries", "9"]


@pytest.mark.slow
def test_a_compile_that_takes_too_long_is_named_and_makes_no_row(run_python: Path) -> None:
    before = (ROOT / "extensions/plans.csv").read_bytes()
    command = [str(run_python), str(ROOT / "tools/plans.py"), *MISSING, "--minutes", "0.02"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "llama3.1-405b on 1 x v5p 8x8x8, recompute, batch " in done.stdout
    assert "took longer than 1 s" in done.stdout
    assert "1 not reached" in done.stdout
    assert (ROOT / "extensions/plans.csv").read_bytes() == before


@pytest.mark.slow
def test_a_sweep_that_is_ended_ends_its_compile(run_python: Path) -> None:
    with subprocess.Popen([run_python, ROOT / "tools/plans.py", *MISSING]) as sweep:
        try:
            for _ in range(600):
                if compiles := psutil.Process(sweep.pid).children():
                    break
                time.sleep(0.1)
            sweep.terminate()
            assert sweep.wait(60) == 130
        finally:
            sweep.kill()
    assert compiles
    assert not psutil.wait_procs(compiles, timeout=10)[1]


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
