"""List the run's checkpoints in the bucket: size, age, whether each is committed, and which one a resume would take."""

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import yaml
from google.api_core import exceptions
from google.auth.exceptions import DefaultCredentialsError, RefreshError
from google.cloud import storage
from rich.table import Table

from ops import run_env, terminal
from ops.run_env import ROOT, RunEnv
from ops.terminal import UserError

# Orbax writes a checkpoint on Cloud Storage in place and this file last (orbax.checkpoint path/temporary_paths.py): a
# folder without it is still being written, or was left behind by a run that died.
COMMITTED = "commit_success.txt"
TIMEOUT_SECONDS = 60  # for one page of the listing
EPOCH = datetime.fromtimestamp(0, UTC)


@dataclasses.dataclass
class Checkpoint:
    """One step's folder: its size in bytes, when it last changed, and whether it is whole."""

    step: int
    size: int = 0
    changed: datetime = EPOCH
    committed: bool = False


def folder_of(config: dict[str, Any]) -> tuple[str, str]:
    """Return bucket and prefix of the run's checkpoints, as MaxText derives them from its config.

    Raises UserError when the config writes elsewhere than to a bucket.
    """
    base = str(config["base_output_directory"])
    if not base.startswith("gs://"):
        raise UserError(f"base_output_directory in config/train.yml is '{base}', but checkpoints go to gs://BUCKET/...")
    bucket, _, path = base.removeprefix("gs://").strip("/").partition("/")
    return bucket, "/".join(filter(None, [path, str(config["run_name"]), "checkpoints"])) + "/"


def grouped(blobs: Iterable[storage.Blob], prefix: str) -> list[Checkpoint]:
    """Sum up the objects below `prefix` by step, oldest step first. What is not below a step's folder is left out."""
    found: dict[int, Checkpoint] = {}
    for blob in blobs:
        step, slash, rest = blob.name.removeprefix(prefix).partition("/")
        if not slash or not step.isdecimal():
            continue
        checkpoint = found.setdefault(int(step), Checkpoint(int(step)))
        checkpoint.size += blob.size or 0
        checkpoint.changed = max(checkpoint.changed, blob.updated)
        checkpoint.committed |= rest == COMMITTED
    return [found[step] for step in sorted(found)]


def resumed_step(checkpoints: list[Checkpoint]) -> int | None:
    """Return the step of the checkpoint that a resume takes, None when it starts at step 0."""
    return max((checkpoint.step for checkpoint in checkpoints if checkpoint.committed), default=None)


def age(since: datetime, now: datetime) -> str:
    """Say how long ago something was, in the largest unit that fits twice."""
    seconds = max(0, int((now - since).total_seconds()))
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} seconds ago"


def read(run: RunEnv) -> tuple[str, list[Checkpoint]]:
    """Return the gs:// folder and the checkpoints in it. Raises UserError for whatever the user can put right."""
    run.refuse_placeholders("bucket")
    bucket, prefix = folder_of(yaml.safe_load((ROOT / "config" / "train.yml").read_text(encoding="utf-8")))
    with explained(bucket):
        client = storage.Client(project=run.project_id)
        listing = client.list_blobs(
            bucket, prefix=prefix, fields="items(name,size,updated),nextPageToken", timeout=TIMEOUT_SECONDS
        )
        with terminal.Progress() as progress:
            objects = []
            for blob in listing:
                objects.append(blob)
                if len(objects) % 1000 == 0:
                    progress.update(f"reading gs://{bucket}/{prefix}", f"{len(objects)} objects")
    return f"gs://{bucket}/{prefix}", grouped(objects, prefix)


@contextlib.contextmanager
def explained(bucket: str) -> Iterator[None]:
    """Turn what goes wrong with a bucket into a UserError with the next command."""
    try:
        yield
    except (DefaultCredentialsError, RefreshError):
        raise UserError("no login for Google Cloud: gcloud auth application-default login") from None
    except exceptions.NotFound:
        raise UserError(f"there is no bucket gs://{bucket}: make infra-bucket") from None
    except exceptions.Forbidden:
        raise UserError(
            f"you may not list gs://{bucket}. Whoever owns it can run: gcloud storage buckets add-iam-policy-binding "
            f"gs://{bucket} --member=user:YOU --role=roles/storage.objectViewer"
        ) from None
    except (exceptions.GoogleAPIError, ConnectionError, OSError) as problem:
        raise UserError(f"gs://{bucket} could not be read: {problem}. Check the network and try again") from None


def main() -> int:
    """Print the table; 0 when the bucket could be read, whether or not it holds a checkpoint."""
    folder, checkpoints = read(run_env.load())
    if not checkpoints:
        terminal.console.print(f"No checkpoint in {folder} yet: a run starts at step 0.")
        return 0
    resumed = resumed_step(checkpoints)
    now = datetime.fromtimestamp(time.time(), UTC)
    table = Table(title=folder, title_justify="left", box=None, padding=(0, 2))
    for column in ("step", "size", "saved", ""):
        table.add_column(column, justify="right" if column in ("step", "size") else "left")
    for checkpoint in checkpoints:
        state = "not committed: being written, or left behind by a run that died"
        if checkpoint.committed:
            state = "a resume takes this one" if checkpoint.step == resumed else ""
        size = f"{checkpoint.size / 2**30:.2f} GiB"
        table.add_row(str(checkpoint.step), size, age(checkpoint.changed, now), state)
    terminal.console.print(table)
    if resumed is None:
        terminal.console.print("None is committed: a run starts at step 0.")
    return 0


if __name__ == "__main__":
    terminal.run(main)
