"""How much of the run's time was training: from what MaxText recorded in Cloud Logging, where recording is on."""

import argparse
import logging
import os
from typing import Any

from google.api_core import exceptions
from google.auth.exceptions import DefaultCredentialsError, RefreshError

from ops import run_env, runs, terminal
from ops.run_env import RunEnv
from ops.terminal import UserError


def job_name(config: dict[str, Any]) -> str:
    """Return the name under which MaxText records (maxtext/common/goodput.py)."""
    return str(config.get("goodput_job_name") or config["run_name"])


def how_to_turn_on(run: RunEnv) -> str:
    """Return what to do for recording: MaxText's switch, and the right of the pods to write logs."""
    member = (
        f"principal://iam.googleapis.com/projects/$(gcloud projects describe {run.project_id} "
        f'--format="value(projectNumber)")/locations/global/workloadIdentityPools/{run.project_id}.svc.id.goog'
        f"/subject/ns/{run.namespace}/sa/{run.service_account}"
    )
    grant = (
        f"  gcloud projects add-iam-policy-binding {run.project_id} --condition=None "
        f'--role=roles/logging.logWriter --member="{member}"'
    )
    return (
        "goodput recording is off. To turn it on, from the next start of the run: add the line\n"
        "  enable_goodput_recording: true\n"
        f"to config/train.yml, let the pods write logs:\n{grant}\nthen make image, and start the run"
    )


def lines(goodput: float, badput: dict[Any, Any], step: int) -> list[str]:
    """Return the report: shares of the job's time in percent, largest loss first."""
    told = [f"goodput {goodput:.1f} % of the time since the first start, at step {step}"]
    flat: dict[str, float] = {}
    for kind, share in badput.items():
        name = getattr(kind, "name", str(kind)).lower().replace("_", " ")
        # Some kinds are split once more, by a name of their own.
        parts = (
            {f"{name}: {part}": value for part, value in share.items()} if isinstance(share, dict) else {name: share}
        )
        flat |= {part: float(value) for part, value in parts.items()}
    told += [f"  {share:5.1f} %  {name}" for name, share in sorted(flat.items(), key=lambda x: -x[1]) if share >= 0.05]
    return told


def main() -> int:
    """Print the report; 0 when there is one."""
    argparse.ArgumentParser(prog="make goodput", description=__doc__).parse_args()
    run = run_env.load()
    config = runs.config()
    if not config.get("enable_goodput_recording"):
        raise UserError(how_to_turn_on(run))
    run.refuse_placeholders("project_id")
    name = job_name(config)
    os.environ["GOOGLE_CLOUD_PROJECT"] = run.project_id
    logging.disable(logging.WARNING)
    from ml_goodput_measurement import goodput

    try:
        with terminal.Progress() as progress:
            progress.update("reading Cloud Logging", f"logs of {name}")
            calculator = goodput.GoodputCalculator(job_name=name, logger_name=f"goodput_{name}")
            found = calculator.get_job_goodput(include_badput_breakdown=True)
    except (DefaultCredentialsError, RefreshError):
        raise UserError("no login for Google Cloud: gcloud auth application-default login") from None
    except exceptions.PermissionDenied:
        raise UserError(
            f"you may not read the logs of {run.project_id}: whoever administers it can grant roles/logging.viewer"
        ) from None
    except exceptions.GoogleAPIError as problem:
        raise UserError(f"Cloud Logging could not be read: {problem}") from None
    except ValueError as problem:  # how the package says that there is nothing to calculate with
        raise UserError(f"nothing is recorded for {name} yet ({problem}): make status shows the run") from None
    terminal.console.print("\n".join(lines(*found)))
    return 0


if __name__ == "__main__":
    terminal.run(main)
