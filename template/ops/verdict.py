"""What a rehearsal has to show, judged from its starts."""

import itertools
import math

from ops.rehearsed_start import Start
from ops.run_env import RunEnv
from ops.terminal import Check


def checks(run: RunEnv, first: Start, second: Start | None, saved: list[int], total: int) -> list[Check]:
    """Return the points of the verdict. `saved` are the steps committed when the first start ended or was broken."""
    last = second or first
    losses = [step.loss for step in first.steps]
    finite = bool(losses) and all(map(math.isfinite, losses))
    resumed = resumed_at(first, second)
    expected = saved[-1] + 1 if saved else None
    return [
        Check(
            "hosts placed one to one",
            len(first.placed) == run.num_hosts,
            f"{len(first.placed)} of {run.num_hosts} hosts have a worker of their own ({run.slice_text})",
        ),
        Check(
            "devices and mesh as promised",
            first.mesh_devices == run.num_devices,
            f"mesh over {first.mesh_devices} of {run.num_devices} devices",
        ),
        Check(
            "loss finite and falling",
            finite and losses[-1] < losses[0],
            f"{losses[0]:.3f} at step {first.steps[0].step}, {losses[-1]:.3f} at step {first.steps[-1].step}"
            if losses
            else "no step",
        ),
        Check("checkpoint committed", bool(saved) and saved[-1] > 0, f"steps {', '.join(map(str, saved)) or 'none'}"),
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


def resumed_at(first: Start, second: Start | None) -> int | None:
    """Return the first step after the restart: of the second start, or inside the first where the numbers jump back."""
    if second is not None:
        return second.steps[0].step if second.steps else None
    for before, after in itertools.pairwise(first.steps):
        if after.step <= before.step:
            return after.step
    return None


def elastic_checks(run: RunEnv, start: Start) -> list[Check]:
    """Return the points that only a run has which lost a slice and got it back: three attempts, the second on less."""
    bounds = [*(attempt.steps_before for attempt in start.attempts), len(start.steps)]
    steps = [start.steps[begin:end] for begin, end in itertools.pairwise(bounds)]
    devices = [attempt.devices for attempt in start.attempts]
    resumed = [
        f"{part[0].step if part else 'none'} after checkpoint {attempt.saved[-1] if attempt.saved else 'none'}"
        for attempt, part in zip(start.attempts[1:], steps[1:], strict=True)
    ]
    three = len(devices) == 3
    return [
        Check(
            "went on without the slice",
            three and devices[1] == (run.num_slices - 1) * run.devices_per_slice and bool(steps[1]),
            f"meshes over {', then '.join(map(str, devices)) or 'no'} devices",
        ),
        Check(
            "took the slice back in",
            three and devices[2] == run.num_devices and bool(steps[2]),
            f"steps of each attempt: {', '.join(str(len(part)) for part in steps)}",
        ),
        Check(
            "each time at the right step",
            three
            and all(
                part and attempt.saved and part[0].step == attempt.saved[-1] + 1
                for attempt, part in zip(start.attempts[1:], steps[1:], strict=True)
            ),
            f"went on with step {', and with '.join(resumed) or 'none'}",
        ),
    ]
