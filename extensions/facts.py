"""TPU slices, models and tuned plans: reads the tables beside this file, derives the rest.

Pure functions over three TOML files; no network, clock or state. The module is loaded
by file path (see questionnaire.py), so that an update reads the tables of the template
version that it renders.
"""

import math
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).parent


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((_HERE / name).read_text(encoding="utf-8"))


_TPU = _table("tpu.toml")
_MODELS = _table("models.toml")
PLANS = _table("plans.toml")

GENERATIONS: dict[str, dict[str, Any]] = {name: record for name, record in _TPU.items() if isinstance(record, dict)}
MODELS: dict[str, dict[str, Any]] = _MODELS["offered"]
MODELS_LEFT_OUT: dict[str, str] = _MODELS["left_out"]


class Slice(NamedTuple):
    """One TPU slice as GKE, Ray and MaxText name and count it."""

    generation: str
    topology: str
    machine_type: str
    hosts: int
    chips_per_host: int
    chips: int
    devices_per_host: int
    devices: int
    multi_host: bool
    gke_accelerator: str
    """Value of the node label cloud.google.com/gke-tpu-accelerator."""
    gke_env: str
    """Value of TPU_ACCELERATOR_TYPE that GKE injects, e.g. v5litepod-16."""
    ray_accelerator_type: str
    """ScalingConfig.accelerator_type; Ray compares the exact spelling."""
    ray_pod_type: str
    """Ray's label ray.io/tpu-pod-type, e.g. v6e-16."""
    compile_topology: str
    """MaxText's compile_topology, e.g. v6e-16."""
    boot_disk_type: str
    workload_policy: bool
    """Whether the node pool takes a workload policy in place of --tpu-topology."""
    vcpus_per_host: int
    ram_gib_per_host: int
    hbm_gib_per_device: float
    peak_tflops_per_device: float
    """bf16, dense."""
    hbm_gbps_per_device: float
    ici_link_gbps: float
    """GB/s that one ICI link of a chip carries one way."""
    dcn_gbps_per_chip: float
    """GB/s to other slices; 0 where none is published."""
    clock_ghz: float
    """Clock in which the TPU compiler counts cycles."""
    price_per_chip_hour: str
    """USD on demand, indicative; empty when no price is published."""
    price_date: str


def topologies(generation: str) -> list[str]:
    """Topologies of a generation that GKE, Ray and MaxText can all use, smallest first."""
    return list(GENERATIONS[generation]["topologies"])


def slice_of(generation: str, topology: str) -> Slice:
    """Derive everything about one slice from its generation and topology.

    Raises:
        KeyError: the generation, or the topology in it, is not in the table.
    """
    record = GENERATIONS[generation]
    if topology not in record["topologies"]:
        raise KeyError(topology)
    # A shape that is one VM of some machine is that machine; every larger shape is
    # built of the multi-host machine (GKE's machine table).
    machine = next(
        (m for m in record["machines"] if topology in m["topologies"]),
        next(m for m in record["machines"] if m["multi_host"]),
    )
    chips = math.prod(int(side) for side in topology.split("x"))
    hosts = chips // machine["chips"]
    units = chips * record["units_per_chip"]
    devices_per_chip = record["devices_per_chip"]
    return Slice(
        generation=generation,
        topology=topology,
        machine_type=machine["machine_type"],
        hosts=hosts,
        chips_per_host=machine["chips"],
        chips=chips,
        devices_per_host=machine["chips"] * devices_per_chip,
        devices=chips * devices_per_chip,
        multi_host=hosts > 1,
        gke_accelerator=record["gke_accelerator"],
        gke_env=f"{record['gke_prefix']}-{units}",
        ray_accelerator_type=record["ray_accelerator_type"],
        ray_pod_type=f"{record['ray_prefix']}-{units}",
        compile_topology=f"{record['maxtext_prefix']}-{units}",
        boot_disk_type=record["boot_disk_type"],
        workload_policy=record["workload_policy"] and hosts > 1,
        vcpus_per_host=machine["vcpus"],
        ram_gib_per_host=machine["ram_gib"],
        hbm_gib_per_device=record["hbm_gib_per_device"],
        peak_tflops_per_device=record["peak_tflops_per_chip"] / devices_per_chip,
        hbm_gbps_per_device=record["hbm_gbps_per_chip"] / devices_per_chip,
        ici_link_gbps=record["ici_link_gbps"],
        dcn_gbps_per_chip=record["dcn_gbits_per_chip"] / 8,
        clock_ghz=record["clock_ghz"],
        price_per_chip_hour=record["price_per_chip_hour"],
        price_date=record["price_date"],
    )


def capacities(generation: str) -> list[str]:
    """Ways to obtain a slice of this generation in GKE."""
    flex = ["flex-start"] if GENERATIONS[generation]["flex_start"] else []
    return ["on-demand", "spot", "reservation", *flex]


def price(generation: str, capacity: str) -> tuple[str, str]:
    """USD a chip and hour for this way to obtain it, and when that was seen; "" twice when unknown."""
    record = GENERATIONS[generation]
    if capacity == "on-demand":
        return record["price_per_chip_hour"], record["price_date"]
    if capacity == "flex-start":
        return record.get("flex_start_price", ""), record.get("flex_start_price_date", "")
    return "", ""


def quotas(generation: str, capacity: str) -> list[str]:
    """Compute Engine's quotas of chips in a region of which one must have room, as id or id:TPU family.

    "unknown" stands for one whose id no source names. A reservation was counted when it was made, so there is none.
    Flex-start takes from the spot quota first, otherwise from the ordinary one (Google: provisioning models).
    """
    record = GENERATIONS[generation]
    ordinary, spot = record["quota"] or "unknown", record["spot_quota"] or "unknown"
    return {"on-demand": [ordinary], "spot": [spot], "flex-start": [spot, ordinary], "reservation": []}[capacity]


class Plan(NamedTuple):
    """Batch, sequence and MaxText settings for one model on one slice."""

    sequence_length: int
    """Tokens."""
    per_device_batch_size: int | float
    """Sequences a JAX device and step."""
    ici_parallelism: str
    settings: dict[str, Any]
    flags: list[str]
    source: str
    tuned: bool


def plan_for(model: str, generation: str, topology: str, num_slices: int) -> Plan:
    """The tuned plan of this job, or the plain one when none is known."""
    plain = PLANS["plain"]
    for plan in PLANS["plan"]:
        if (
            model in plan["models"]
            and plan["generation"] == generation
            and plan["topology"] == topology
            and plan["num_slices"] == num_slices
        ):
            return Plan(
                plan["sequence_length"],
                plan["per_device_batch_size"],
                plan["ici_parallelism"],
                plan["settings"],
                plan["flags"],
                " ".join(plan["source"].split()),
                True,
            )
    return Plan(
        plain["sequence_length"],
        plain["per_device_batch_size"],
        "fsdp=-1",
        {},
        [],
        plain["source"],
        False,
    )


def run_plan(
    model: str,
    generation: str,
    topology: str,
    num_slices: int,
    sequence_length: str,
    per_device_batch_size: str,
    ici_parallelism: str,
) -> Plan:
    """What the run uses: the answers, with "auto" taken from the plan.

    A tuned plan's settings belong to its own batch, sequence and mesh (block sizes must
    fit the sequence, memory was computed for the batch), so any other answer falls back
    to the plain settings.
    """
    plan = plan_for(model, generation, topology, num_slices)
    sequence = plan.sequence_length if sequence_length == "auto" else int(sequence_length)
    if per_device_batch_size == "auto":
        batch: int | float = plan.per_device_batch_size
        if sequence != plan.sequence_length or ici_parallelism != plan.ici_parallelism:
            batch = PLANS["plain"]["per_device_batch_size"]
    else:
        number = float(per_device_batch_size)
        batch = int(number) if number.is_integer() else number
    chosen = plan._replace(
        sequence_length=sequence,
        per_device_batch_size=batch,
        ici_parallelism=ici_parallelism,
    )
    if plan.tuned and chosen != plan:
        return chosen._replace(settings={}, flags=[], source=PLANS["plain"]["source"], tuned=False)
    return chosen


def tokenizer_of(model: str, dataset_type: str) -> str:
    """The model's tokenizer: the MaxText wheel's own copy when it carries one, else its
    Hugging Face id. MaxText's hf pipeline reads Hugging Face tokenizers only.
    """
    record = MODELS[model]
    if dataset_type == "hf" and record.get("asset_type") != "huggingface":
        return str(record["tokenizer"])
    return str(record.get("asset", record["tokenizer"]))


def tokenizer_type(tokenizer: str) -> str:
    """How MaxText has to read this tokenizer: sentencepiece, tiktoken or huggingface."""
    for record in MODELS.values():
        if record.get("asset") == tokenizer:
            return str(record["asset_type"])
    if "tiktoken" in tokenizer.rsplit("/", 1)[-1]:
        return "tiktoken"
    if tokenizer.endswith(".model"):
        return "sentencepiece"
    return "huggingface"


def region_of(zone: str) -> str:
    """us-central1-ai1a is in us-central1."""
    return zone.rsplit("-", 1)[0]


def dataset_settings(dataset_type: str, dataset_path: str, dataset_format: str) -> dict[str, str]:
    """MaxText's dataset keys for the answers (keys and their meaning: MaxText base.yml)."""
    if dataset_type == "synthetic":
        return {"dataset_type": "synthetic"}
    if dataset_type == "grain":
        return {
            "dataset_type": "grain",
            "grain_file_type": dataset_format,
            "grain_train_files": dataset_path,
        }
    if dataset_path.startswith(("gs://", "/")):
        return {
            "dataset_type": "hf",
            "hf_path": "parquet",
            "hf_train_files": dataset_path,
        }
    owner, name, *directory = dataset_path.split("/")
    keys = {"dataset_type": "hf", "hf_path": f"{owner}/{name}"}
    if directory:
        keys["hf_data_dir"] = "/".join(directory)
    return keys


def mesh(parallelism: str) -> dict[str, int]:
    """Parse "fsdp=4,tensor=4" into {"fsdp": 4, "tensor": 4}.

    Raises:
        ValueError: the text is not a comma list of axis=size with each axis once.
    """
    sizes: dict[str, int] = {}
    for part in parallelism.split(","):
        axis, _, size = part.partition("=")
        if not size or axis in sizes:
            raise ValueError(part)
        sizes[axis] = int(size)
    return sizes


def filled(sizes: dict[str, int], total: int) -> dict[str, int] | None:
    """The mesh with its one -1 replaced so that the product is total, or None."""
    known = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if total % known:
            return None
        return {a: total // known if s == -1 else s for a, s in sizes.items()}
    return sizes if known == total else None
