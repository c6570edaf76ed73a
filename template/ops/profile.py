"""Profile some steps in a short run with MaxText's profiler, into the bucket; --view fetches the newest profile."""

import argparse
import re
from pathlib import Path

from google.cloud import storage

from ops import checkpoints, run_env, runs, submit, terminal
from ops.run_env import ROOT, RunEnv
from ops.terminal import UserError

STEPS = 5
TARGET = ROOT / "build" / "profile"
PORT = 8791  # xprof's own default


def folder_of(run: RunEnv) -> tuple[str, str]:
    """Return bucket and prefix of the profiles, as MaxText derives them from its config."""
    config = runs.config() | {"run_name": submit.profile_name(run)}
    bucket, prefix = checkpoints.folder_of(config)
    return bucket, prefix.removesuffix("checkpoints/") + "tensorboard/"


def newest(names: list[str], prefix: str) -> list[str]:
    """Return the names of the objects of the newest profile: its folder is named by its time."""
    stamps: dict[str, list[str]] = {}
    for name in names:
        if found := re.match(r"plugins/profile/([^/]+)/.", name.removeprefix(prefix)):
            stamps.setdefault(found[1], []).append(name)
    return stamps[max(stamps)] if stamps else []


def fetch(run: RunEnv) -> Path:
    """Fetch the newest profile; return the folder to point xprof or TensorBoard to. Raises UserError."""
    run.refuse_placeholders("bucket")
    bucket, prefix = folder_of(run)
    with checkpoints.explained(bucket):
        place = storage.Client(project=run.project_id).bucket(bucket)
        listing = place.list_blobs(prefix=f"{prefix}plugins/profile/", timeout=checkpoints.TIMEOUT_SECONDS)
        names = newest([blob.name for blob in listing], prefix)
        if not names:
            raise UserError(f"there is no profile in gs://{bucket}/{prefix} yet: make profile")
        with terminal.Progress() as progress:
            for number, name in enumerate(names, 1):
                progress.update("fetching", f"{number} of {len(names)} files")
                target = TARGET / name.removeprefix(prefix)
                target.parent.mkdir(parents=True, exist_ok=True)
                place.blob(name).download_to_filename(str(target), timeout=checkpoints.TIMEOUT_SECONDS)
    return TARGET


def main() -> int:
    """Run and profile, or fetch a profile; the exit code is the run's own."""
    parser = argparse.ArgumentParser(prog="make profile", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="MaxText settings for this run")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"to profile (default {STEPS})")
    parser.add_argument("--view", action="store_true", help="fetch the newest profile and say how to look at it")
    parser.add_argument("--old-image", action="store_true", help="also when the cluster runs another image")
    arguments = parser.parse_intermixed_args()
    run = run_env.load()
    if arguments.steps < 1:
        raise UserError(f"--steps is {arguments.steps}, but a profile takes at least 1 step")
    if arguments.view:
        folder = runs.shown(fetch(run))
        terminal.console.print(
            f"The newest profile is in {folder}. Look at it with\n"
            f"  .venv/bin/xprof server --logdir={folder} --port={PORT}\n"
            f"then http://localhost:{PORT} (xprof listens on every interface of this machine: end it with Ctrl-C)"
        )
        return 0
    code = submit.submit("profile", arguments.overrides, arguments.old_image, arguments.steps)
    if code == 0:
        bucket, prefix = folder_of(run)
        terminal.console.print(f"The profile is in gs://{bucket}/{prefix}: make profile ARGS=--view fetches it.")
    return code


if __name__ == "__main__":
    terminal.run(main)
