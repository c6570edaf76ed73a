"""What a rehearsal has to show, judged from its starts."""

import itertools
import math

from ops.rehearsed_start import Start
from ops.run_env import RunEnv
from ops.terminal import Check


def checks(run: RunEnv, first: Start, saved: list[int]) -> list[Check]:
    """Return the points of every verdict. `saved` are the steps committed when the first start ended or was broken."""
    losses = [step.loss for step in first.steps]
    mesh = first.attempts[0].devices if first.attempts else 0
    finite = bool(losses) and all(map(math.isfinite, losses))
    return [
        Check(
            "hosts placed one to one",
            len(first.placed) == run.num_hosts,
            f"{len(first.placed)} of {run.num_hosts} hosts have a worker of their own ({run.slice_text})",
        ),
        Check(
            "devices and mesh as promised",
            mesh == run.num_devices,
            f"mesh over {mesh} of {run.num_devices} devices",
        ),
        Check(
            "loss finite and falling",
            finite and losses[-1] < losses[0],
            f"{losses[0]:.3f} at step {first.steps[0].step}, {losses[-1]:.3f} at step {first.steps[-1].step}"
            if losses
            else "no step",
        ),
        Check("checkpoint committed", bool(saved) and saved[-1] > 0, f"steps {', '.join(map(str, saved)) or 'none'}"),
    ]


def restart_checks(first: Start, second: Start | None, saved: list[int], total: int) -> list[Check]:
    """Return the points about the second start, or the restart of a worker, and about the end."""
    last = second or first
    resumed = resumed_at(first, second)
    expected = saved[-1] + 1 if saved else None
    return [
        Check(
            "resumed at the right step",
            resumed is not None and resumed == expected,
            f"went on with step {resumed} after checkpoint {saved[-1] if saved else 'none'}",
        ),
        Check(
            "ended well",
            last.returncode == 0 and bool(last.steps) and last.steps[-1].step == total - 1,
            f"exit code {last.returncode} after step {last.steps[-1].step if last.steps else 'none'} of {total}",
        ),
    ]


def elastic_checks(run: RunEnv, start: Start) -> list[Check]:
    """Return the points about a slice that was lost and came back: the run goes on without it, and then with it."""
    fewer = run.num_devices - run.devices_per_slice
    attempts = [attempt for attempt in start.attempts if attempt.steps]
    told = [f"{len(attempt.steps)} on {attempt.devices} devices" for attempt in attempts]
    resumed = [(attempt.steps[0], attempt.saved[-1] if attempt.saved else None) for attempt in attempts[1:]]
    return [
        Check(
            "went on without the slice",
            trained_on(start, run.num_devices, fewer),
            f"steps: {', then '.join(told) or 'none'}",
        ),
        Check(
            "took the slice back in",
            trained_on(start, run.num_devices, fewer, run.num_devices),
            f"{attempts[-1].devices if attempts else 'no'} of {run.num_devices} devices at the end",
        ),
        Check(
            "resumed at the right steps",
            bool(resumed) and all(saved is not None and step == saved + 1 for step, saved in resumed),
            "; ".join(f"went on with step {step} after checkpoint {saved}" for step, saved in resumed) or "never",
        ),
    ]


def trained_on(start: Start, *devices: int) -> bool:
    """True when there were steps on so many devices, in this order."""
    attempts = iter(attempt.devices for attempt in start.attempts if attempt.steps)
    return all(count in attempts for count in devices)


def resumed_at(first: Start, second: Start | None) -> int | None:
    """Return the first step after the restart: of the second start, or inside the first where the numbers jump back."""
    if second is not None:
        return second.steps[0].step if second.steps else None
    for before, after in itertools.pairwise(first.steps):
        if after.step <= before.step:
            return after.step
    return None
