"""Start the run on the RayCluster and follow it: make train, resume and profile."""

import argparse
import re

from ops import checkpoints, kube, manifests, ray_jobs, run_env, runs, terminal
from ops.ray_jobs import Jobs
from ops.run_env import RunEnv
from ops.terminal import UserError

PROFILE_SKIPPED = 5  # steps before the profile: the first ones compile


def check_overrides(overrides: list[str]) -> None:
    """Raise UserError for what MaxText would not take."""
    for word in overrides:
        if not re.fullmatch(r"\w+=.*", word, re.DOTALL):
            raise UserError(f"'{word}' is no override: give key=value, e.g. ARGS=steps=200")
        if word.startswith("run_name="):
            raise UserError("run_name is part of the answers: make reconfigure ARGS=run_name=..., then make image")


def resumed(run: RunEnv, jobs: Jobs, overrides: list[str]) -> list[str]:
    """Say which checkpoint a resume takes; return the overrides: those given, else those of the last run.

    Raises UserError when there is nothing left to do.
    """
    last = jobs.newest()
    if not overrides and last and not str(last.submission_id).startswith(f"{profile_name(run)}-"):
        overrides = runs.overrides_of(last.entrypoint)
        if overrides:
            terminal.notice(f"as {last.submission_id} was: {' '.join(overrides)}")
    folder, found = checkpoints.read(run)
    step = checkpoints.resumed_step(found)
    total = runs.steps_of(" ".join(overrides))
    if step is None:
        terminal.notice(f"no committed checkpoint in {folder}: the run starts at step 0")
    elif step + 1 >= total:
        raise UserError(
            f"all {total} steps are done, checkpoint {step} is the last: give more, e.g. ARGS=steps={2 * total}"
        )
    else:
        terminal.notice(f"takes checkpoint {step} in {folder} and goes on with step {step + 1} of {total}")
    return overrides


def profile_name(run: RunEnv) -> str:
    """Return the name of the run's profiling runs: one of their own, so that they leave the checkpoints alone."""
    return f"{run.run_name}-profile"


def profile_overrides(run: RunEnv, steps: int) -> list[str]:
    """Return the overrides of a short run of its own that profiles `steps` steps and touches no checkpoint."""
    return [
        f"run_name={profile_name(run)}",
        "enable_checkpointing=false",
        "profiler=xplane",
        f"skip_first_n_steps_for_profiler={PROFILE_SKIPPED}",
        f"profiler_steps={steps}",
        f"steps={PROFILE_SKIPPED + steps + 1}",
    ]


def submit(kind: str, overrides: list[str], old_image: bool = False, profiled_steps: int = 0) -> int:
    """Start a run of `kind` (train, resume, profile) and follow it; return its own exit code. Raises UserError."""
    check_overrides(overrides)
    run = run_env.load()
    cluster = kube.connect(run)
    runs.refuse_beside_a_job(cluster)
    there = cluster.cluster()
    if there and not old_image:
        runs.refuse_old_image(there)
    with runs.head(cluster, run.raycluster_name) as jobs:
        if busy := jobs.running():
            raise UserError(f"{ray_jobs.label(busy)} is running: make status follows it, make stop ends it")
        name = run.run_name
        if kind == "resume":
            overrides = resumed(run, jobs, overrides)
        elif kind == "profile":
            name = profile_name(run)
            overrides = [*profile_overrides(run, profiled_steps), *overrides]
        submission_id = jobs.submit(name, [*manifests.entrypoint(), *overrides])
        terminal.console.print(f"{submission_id} is submitted: the run goes on without this terminal.")
        return runs.follow(run, jobs, submission_id)


def main() -> int:
    """Start the run and follow it; the exit code is the run's own."""
    parser = argparse.ArgumentParser(prog="make train", description=__doc__)
    parser.add_argument("kind", choices=["train", "resume"])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="MaxText settings for this run")
    parser.add_argument("--old-image", action="store_true", help="also when the cluster runs another image")
    arguments = parser.parse_intermixed_args()
    return submit(arguments.kind, arguments.overrides, arguments.old_image)


if __name__ == "__main__":
    terminal.run(main)
