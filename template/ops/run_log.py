"""What a training log tells: MaxText's lines about the mesh and about each step."""

import dataclasses
import re

_STEP = re.compile(
    r"completed step: (?P<step>\d+), seconds: (?P<seconds>[\d.]+), TFLOP/s/device: (?P<tflops>[\d.]+), "
    r"Tokens/s/device: (?P<tokens>[\d.]+),.* loss: (?P<loss>[\d.a-z]+), lm_loss"
)


@dataclasses.dataclass(frozen=True)
class Step:
    """One completed step: its number from 0, its time, model TFLOP/s and tokens/s a device, and the loss."""

    step: int
    seconds: float
    tflops_per_device: float
    tokens_per_device: float
    loss: float


def mesh_devices(line: str) -> int | None:
    """Return how many JAX devices the mesh has that `line` reports, or None when it reports none."""
    found = re.search(r"Num_devices: (\d+), shape", line)
    return int(found[1]) if found else None


def completed_step(line: str) -> Step | None:
    """Return the step that `line` reports, or None when it reports none."""
    found = _STEP.search(line)
    if not found:
        return None
    return Step(
        int(found["step"]),
        float(found["seconds"]),
        float(found["tflops"]),
        float(found["tokens"]),
        float(found["loss"]),
    )
