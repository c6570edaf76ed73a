"""Sweep the plans: compile every tuned configuration that may be the best for a job, and keep what the compiler says.

    python tools/plans.py [--only PATTERN] [--recipe NAME] [--tries N] [--hours H] [--minutes M] [--list]
    python tools/plans.py --spot-check N

For each job of JOBS, in their order, each recipe of extensions/plans.toml is compiled for the largest batch that the
closed formula lets hope for, then for smaller or larger ones until the best is found. Each compile adds a row to
extensions/plans.csv at once, so a sweep can be ended and started again; a row that is there is not compiled again. The
end says what was not reached, and what took too long: that depends on the machine, so it makes no row. --spot-check
compiles some rows again and holds them against the table. To be run with the Python of a generated repository
(`make plans`).
"""

import argparse
import csv
import datetime
import fnmatch
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "template")]

from ops import compile_step, estimate, libtpu  # noqa: E402

from extensions import facts  # noqa: E402

TABLE = ROOT / "extensions" / "plans.csv"
FOLDER = ROOT / "build" / "plans"
# Compiles of one recipe for one job: a first guess, and two to correct it.
TRIES = 3
# The share of the usable HBM that the first guess takes: a compile near the limit takes several times as long, and one
# beyond it tells no speed. The second guess stands on the first one's size, not on the formula.
FIRST_GUESS = 0.9
# Compiling is deterministic; what is left is for another processor.
SPOT_CHECK_ERROR = 0.01
MINUTES = 60

_SMALL = ["llama3-8b", "mistral-7b", "qwen3-8b", "gemma3-4b", "qwen3-4b", "qwen3-0.6b"]
_MIDDLE = ["qwen3-14b", "gemma3-12b", "qwen3-32b", "gemma3-27b", "llama3-70b"]
_EXPERTS = ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek2-16b", "mixtral-8x7b"]
_ALL = _SMALL + _MIDDLE + _EXPERTS
# Models, generation, topologies, slices. First one slice of each generation for each model, the smallest on which it
# fits; a larger slice takes that one's plan until its own is compiled.
JOBS: list[tuple[list[str], str, list[str], int]] = [
    (["llama3-8b"], "v6e", ["4x4"], 1),
    (_SMALL, "v6e", ["4x4"], 1),
    (_MIDDLE + _EXPERTS, "v6e", ["4x4", "4x8", "8x8"], 1),
    (_ALL, "v5p", ["2x2x2", "2x2x4"], 1),
    (_ALL, "v5e", ["4x4", "8x8", "8x16", "16x16"], 1),
    (_ALL, "tpu7x", ["2x2x1", "2x2x2"], 1),
    (_ALL, "v4", ["2x2x2", "2x4x4"], 1),
    (["llama3-8b"], "v6e", ["4x4"], 2),
    (_ALL, "v6e", ["2x4", "4x8", "8x8", "8x16"], 1),
    (_ALL, "v5p", ["4x4x4"], 1),
    (_ALL, "tpu7x", ["4x4x4"], 1),
    (["llama3.1-405b"], "v5p", ["8x8x8"], 1),
]


class Job(NamedTuple):
    """One model on one set of slices."""

    model: str
    generation: str
    topology: str
    num_slices: int

    def __str__(self) -> str:
        return f"{self.model} on {self.num_slices} x {self.generation} {self.topology}"


def jobs() -> Iterator[Job]:
    """Every job once: of each entry of JOBS the first slice on which a model fits, then the other slices."""
    seen = set()
    for first in (True, False):
        for models, generation, topologies, num_slices in JOBS:
            for model in models:
                fitting = [name for name in topologies if facts.can_fit(model, generation, name)]
                for topology in fitting[:1] if first else fitting[1:]:
                    job = Job(model, generation, topology, num_slices)
                    if job not in seen:
                        seen.add(job)
                        yield job


class Missed(Exception):
    """A compile that this machine did not bring to an end: it says nothing about the job."""


def compiled(job: Job, recipe: str, batch: float, minutes: float = MINUTES) -> dict[str, str]:
    """Compile one configuration and return its row of the table.

    Raises:
        Missed: the machine has too little memory, or the compile takes longer than `minutes`.
    """
    sequence = facts.PLANS["default"]["sequence_length"]
    shape = facts.slice_of(job.generation, job.topology)
    settings = facts.recipe_settings(recipe)
    values = {
        "base_config": "base.yml",
        "run_name": "plan",
        "base_output_directory": "/tmp/plan",
        "dataset_type": "synthetic",
        "hardware": "tpu",
        "jax_cache_dir": "",
        "model_name": job.model,
        "max_target_length": sequence,
        "per_device_batch_size": batch,
        "ici_fsdp_parallelism": -1,
        "dcn_data_parallelism": -1,
        **facts.MODELS[job.model].get("settings", {}),
        **settings,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    config = FOLDER / "plan.yml"
    config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()), encoding="utf-8")
    request = compile_step.Request(
        config=str(config),
        overrides=(),
        flags=tuple(facts.recipe_flags(recipe, job.generation)),
        compile_topology=shape.compile_topology,
        num_slices=job.num_slices,
    )
    began = time.monotonic()
    answer = compile_step.compile(request, FOLDER / "compile", timeout=minutes * 60)
    row = {
        "model": job.model,
        "generation": job.generation,
        "topology": job.topology,
        "num_slices": str(job.num_slices),
        "recipe": recipe,
        "sequence_length": str(sequence),
        "per_device_batch_size": f"{batch:g}",
        **dict.fromkeys(("hbm_gib", "step_seconds", "tokens_per_second", "mfu", "binds", "problem"), ""),
        **made_by(job, recipe),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "compile_seconds": f"{time.monotonic() - began:.0f}",
    }
    if isinstance(answer, compile_step.Failure) and answer.kind in ("timeout", "host memory"):
        raise Missed(answer.message)
    if isinstance(answer, compile_step.Failure):
        needed = f"{answer.needed_gib:.2f}" if answer.needed_gib else ""
        return row | {"problem": answer.kind if answer.kind == "hbm" else answer.message[:200], "hbm_gib": needed}
    size = answer.memory.total / 2**30
    if size > shape.hbm_gib_per_device:  # compiles, but the runtime could not allocate it
        return row | {"problem": "hbm", "hbm_gib": f"{size:.2f}"}
    guess = estimate.estimate(answer, estimate.Hardware.of(shape))
    return row | {
        "hbm_gib": f"{size:.2f}",
        "step_seconds": f"{guess.step:.3f}",
        "tokens_per_second": f"{guess.tokens_per_second:.0f}",
        "mfu": f"{guess.mfu:.3f}",
        "binds": guess.binds,
    }


def add(row: dict[str, str]) -> None:
    """Append one row to the table, with its header when it is new."""
    new = not TABLE.exists()
    with TABLE.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(facts.COLUMNS), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def made_by(job: Job, recipe: str) -> dict[str, str]:
    """What a row has to have been made with to be of use: today's compiler, MaxText and recipe."""
    versions = libtpu.versions()
    configuration = facts.recipe_fingerprint(recipe, job.generation)
    return {"libtpu": versions["libtpu"], "maxtext": versions["maxtext"], "configuration": configuration}


def job_of(row: dict[str, str]) -> Job:
    """The job of a row."""
    return Job(row["model"], row["generation"], row["topology"], int(row["num_slices"]))


def is_current(row: dict[str, str]) -> bool:
    """Whether a row was made with what is here today."""
    return made_by(job_of(row), row["recipe"]).items() <= row.items()


def known(job: Job, recipe: str) -> dict[float, dict[str, str]]:
    """Current rows of this job and recipe, by batch."""
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {
            float(row["per_device_batch_size"]): row
            for row in csv.DictReader(file)
            if (job_of(row), row["recipe"]) == (job, recipe) and is_current(row)
        }


def fitting(rows: dict[float, dict[str, str]]) -> list[float]:
    """The batches that fit with headroom."""
    return [
        batch
        for batch, row in rows.items()
        if not row["problem"] and float(row["hbm_gib"]) <= facts.usable_gib(row["generation"])
    ]


def next_batch(job: Job, recipe: str, rows: dict[float, dict[str, str]], tries: int) -> float | None:
    """Return the batch to compile next, None when the best one is found or `tries` are over.

    The largest whole batch that fits is taken for the best: fixed costs are shared by more tokens.
    """
    limit = facts.usable_gib(job.generation)
    fits = fitting(rows)
    if any(row["problem"] not in ("", "hbm") for row in rows.values()):
        return None  # another batch would not mend it
    sizes = {batch: float(row["hbm_gib"]) for batch, row in rows.items() if row["hbm_gib"]}
    fails = [batch for batch in rows if batch not in fits]
    if recipe == "plain":  # what is left when no recipe fits
        tuned = any(fitting(known(job, other)) for other in facts.PLANS["recipe"] if other != "plain")
        return None if rows or tuned else facts.PLANS["default"]["per_device_batch_size"]
    if not rows:
        # jobs() has only what may fit, so that one sequence is worth a compile even if the formula says no.
        return facts.largest_batch(job.model, job.generation, job.topology, recipe, FIRST_GUESS * limit) or 1.0
    if len(rows) >= tries:
        return None
    low, high = max(fits, default=0.0), min(fails, default=math.inf)
    if sizes:
        # A straight line through what is known: the state alone takes its share at batch 0.
        batch = max(sizes)
        state = facts.state_gib(job.model, job.generation, job.topology)
        guess = float((limit - state) // max((sizes[batch] - state) / batch, 1e-3))
    else:
        guess = high // 2
    guess = min(max(guess, low), high - 1, facts.LARGEST_BATCH)
    return guess if guess >= 1 and guess not in rows else None


def sweep(pattern: str, only_recipe: str, tries: int, hours: float, minutes: float) -> list[str]:
    """Compile until all is known or the time is over; return what was not reached, and why."""
    ends = time.monotonic() + hours * 3600
    missed = []
    for job in jobs():
        if not fnmatch.fnmatch(str(job), f"*{pattern}*"):
            continue
        for recipe in facts.PLANS["recipe"]:
            if only_recipe not in ("", recipe):
                continue
            while (batch := next_batch(job, recipe, known(job, recipe), tries)) is not None:
                what = f"{job}, {recipe}, batch {batch:g}"
                if time.monotonic() > ends:
                    missed.append(f"{what}: no time left")
                    break
                try:
                    row = compiled(job, recipe, batch, minutes)
                except Missed as reason:
                    missed.append(f"{what}: {reason}")
                    print(missed[-1], flush=True)
                    break
                add(row)
                told = row["problem"] or f"{row['tokens_per_second']} tokens/s a device, MFU {row['mfu']}"
                size = f"{row['hbm_gib'] or '?'} GiB"
                print(f"{what}: {size}, {told} ({row['compile_seconds']} s)", flush=True)
    return missed


def spot_check(count: int) -> list[str]:
    """Compile `count` rows again, the quickest of as many generations; return how they differ from the table."""
    current = [row for row in facts.COMPILED if is_current(row)]
    if not current:
        return [f"no row of {TABLE.name} was made with today's compiler and recipes: run `make plans`"]
    quickest: dict[str, dict[str, str]] = {}
    for row in sorted(current, key=lambda row: int(row["compile_seconds"])):
        quickest.setdefault(row["generation"], row)
    differences = []
    for row in list(quickest.values())[:count]:
        what = f"{job_of(row)}, {row['recipe']}"
        try:
            again = compiled(job_of(row), row["recipe"], float(row["per_device_batch_size"]))
        except Missed as reason:
            differences.append(f"{what}: {reason}")
            continue
        print(f"{what}: {again['hbm_gib']} GiB, {again['tokens_per_second']} tokens/s", flush=True)
        for name in ("hbm_gib", "tokens_per_second", "mfu"):
            before, now = float(row[name] or 0), float(again[name] or 0)
            if abs(now - before) > SPOT_CHECK_ERROR * before:
                differences.append(f"{what}: {name} is {now:g}, the table has {before:g}")
        if again["problem"] != row["problem"]:
            differences.append(f"{what}: now '{again['problem']}', the table has '{row['problem']}'")
    return differences


def main() -> None:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="jobs that this pattern is in, e.g. 'llama3-8b on 1 x v6e'")
    parser.add_argument("--recipe", default="", help="this recipe only")
    parser.add_argument("--tries", type=int, default=TRIES, help=f"compiles of a recipe for a job (default {TRIES})")
    parser.add_argument("--hours", type=float, default=math.inf, help="begin no compile after so many hours")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"end a compile after so many (default {MINUTES})"
    )
    parser.add_argument("--list", action="store_true", help="list the jobs and what is known of them, compile nothing")
    parser.add_argument("--spot-check", type=int, default=0, metavar="N", help="compile N rows again and compare")
    arguments = parser.parse_args()
    # A polite kill ends the compile as well, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments.spot_check:
        if differences := spot_check(arguments.spot_check):
            sys.exit("\n".join(differences))
        return
    if arguments.list:
        for job in jobs():
            counts: dict[str, Any] = {recipe: len(known(job, recipe)) for recipe in facts.PLANS["recipe"]}
            print(f"{job!s:<44}", "  ".join(f"{recipe} {count}" for recipe, count in counts.items()))
        return
    missed: list[str] = sweep(arguments.only, arguments.recipe, arguments.tries, arguments.hours, arguments.minutes)
    print(f"{len(missed)} not reached" + "".join(f"\n  {one}" for one in missed))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
