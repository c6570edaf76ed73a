"""run.env as typed values: the only reader of that file in Python.

Standard library only, so that it also works before the packages are installed and inside a Ray worker.
"""

import dataclasses
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class RunEnvError(ValueError):
    """run.env cannot be used; the message says what is wrong and what to do."""


@dataclasses.dataclass(frozen=True)
class RunEnv:
    """What the answers promise. Counts are per slice or per host as the name says; devices are JAX devices."""

    project_name: str
    project_id: str
    region: str
    zone: str
    bucket: str
    cluster_name: str
    cluster_mode: str
    cluster_location: str
    namespace: str
    service_account: str
    registry: str
    image_repository: str
    raycluster_name: str
    unanswered: str
    run_name: str
    model: str
    steps: int
    max_failures: int
    generation: str
    topology: str
    num_slices: int
    min_slices: int  # as many are enough to go on; num_slices where all are needed
    hosts_per_slice: int
    chips_per_host: int
    chips_per_slice: int
    devices_per_host: int
    devices_per_slice: int
    ray_accelerator_type: str
    ray_pod_type: str
    gke_accelerator: str
    gke_tpu_env: str
    compile_topology: str
    machine_type: str
    capacity: str
    reservation: str
    hbm_gib_per_device: float
    peak_tflops_per_device: float
    hbm_gbps_per_device: float
    ici_link_gbps: float
    dcn_gbps_per_chip: float
    clock_ghz: float
    price_per_chip_hour: str  # USD, on demand, indicative; empty where none is known
    price_date: str

    @property
    def elastic(self) -> bool:
        """True when the run goes on with fewer slices while some are lost."""
        return self.min_slices < self.num_slices

    @property
    def num_hosts(self) -> int:
        """Hosts of all slices: one Ray worker each."""
        return self.num_slices * self.hosts_per_slice

    @property
    def num_devices(self) -> int:
        """JAX devices of all slices."""
        return self.num_slices * self.devices_per_slice

    @property
    def device_counts(self) -> list[int]:
        """JAX devices that the run may train on: those of min_slices to num_slices slices."""
        return [count * self.devices_per_slice for count in range(self.min_slices, self.num_slices + 1)]

    @property
    def slice_text(self) -> str:
        """The slices as people say it, e.g. `2 x v5p 2x2x2`."""
        return f"{self.num_slices} x {self.generation} {self.topology}"

    def refuse_placeholders(self, *answers: str) -> None:
        """Raise RunEnvError when one of `answers` is still the placeholder that the questionnaire put there."""
        for answer in answers:
            if answer in self.unanswered.split(","):
                raise RunEnvError(
                    f"{answer} is still the placeholder '{getattr(self, answer)}': make reconfigure ARGS={answer}=..."
                )


def path() -> Path:
    """Return the file to read: $RUN_ENV (the rehearsal sets it), else run.env beside train.py."""
    return Path(os.environ.get("RUN_ENV") or ROOT / "run.env")


def read(file: Path) -> dict[str, str]:
    """Return the KEY=value lines of `file`, in order. Raises RunEnvError without a file or for any other line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise RunEnvError(f"{file} is missing: copier renders it; run this from the generated repository") from None
    values = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        key, equals, value = line.partition("=")
        if not equals or not key.isidentifier():
            raise RunEnvError(f"{file}:{number} is '{line}', but every line is KEY=value")
        values[key] = value
    return values


def load(file: Path | None = None) -> RunEnv:
    """Return the typed values of `file` (default: `path()`). Raises RunEnvError naming a key absent or wrong."""
    file = file or path()
    values = read(file)
    typed: dict[str, str | int | float] = {}
    for field in dataclasses.fields(RunEnv):
        key = field.name.upper()
        if key not in values:
            raise RunEnvError(f"{file} has no {key}: it is older than this code; run make update")
        try:
            typed[field.name] = {"int": int, "float": float}.get(getattr(field.type, "__name__", ""), str)(values[key])
        except ValueError:
            raise RunEnvError(f"{file}: {key} is '{values[key]}', but must be a number") from None
    return RunEnv(**typed)  # type: ignore[arg-type]
