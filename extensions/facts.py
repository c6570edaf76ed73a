"""TPU slices, models and tuned plans: reads the tables beside this file, derives the rest.

Pure functions over three TOML files and a CSV file; no network, clock or state. The module is loaded
by file path (see questionnaire.py), so that an update reads the tables of the template
version that it renders.
"""

import csv
import hashlib
import json
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

# Columns of plans.csv, one row a compile; `problem` is empty for a step that compiles, `hbm` for one that does not fit
# (hbm_gib is then what it would need, if the compiler says so), else what the compiler says; `configuration` is the
# recipe's fingerprint.
COLUMNS = (
    *("model", "generation", "topology", "num_slices", "recipe", "sequence_length", "per_device_batch_size"),
    *("hbm_gib", "step_seconds", "tokens_per_second", "mfu", "binds", "problem"),
    *("libtpu", "maxtext", "configuration", "date", "compile_seconds"),
)


def _compiled() -> list[dict[str, str]]:
    with (_HERE / "plans.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


COMPILED = _compiled()
# What a plan leaves free of the HBM that the compiler grants.
HEADROOM = 0.03
# How far the closed formula may be off before a job is refused for it.
FORMULA_ERROR = 0.15
# Bytes that the closed formula counts: at the loss, for each weight of the output head; while a layer runs, for each of
# its weights, those of its experts apart, for each token and dimension of the model, and for each dimension of what
# each expert of a token takes in and gives back, and has between. Fitted to the rows of plans.csv.
HEAD_BYTES = 7.5
LAYER_BYTES = 11
EXPERT_BYTES = 3
TOKEN_BYTES = 121
TOKEN_EXPERT_BYTES = {"emb_dim": 44, "expert_mlp_dim": 16}
# Bytes for each weight of a device that a plan of one slice has to leave free to be taken for several: what the
# compiler asked for on top for two slices, with a plan that keeps activations. One that recomputes needed nothing.
SLICES_BYTES = 18
# More sequences a device than this gain nothing and make large global batches.
LARGEST_BATCH = 16

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
    """Where it comes from and how far it is proven, for people."""
    compiled: bool
    """Whether the TPU compiler has compiled just this job and it fits."""
    hbm_gib: float
    """GiB of HBM a device: the compiler's figure when `compiled`, else the closed formula's."""
    tokens_per_second: int
    """By the compiler's cycles, a device; 0 when it was not compiled."""


def _flags_of(recipe: str, generation: str) -> dict[str, Any]:
    """The entry of [flags] that a recipe takes on a generation; empty for a recipe that takes none."""
    if not PLANS["recipe"][recipe]["flags"]:
        return {}
    return next(group for group in PLANS["flags"].values() if generation in group["generations"])


def recipe_settings(recipe: str) -> dict[str, Any]:
    """MaxText settings of a recipe."""
    settings: dict[str, Any] = PLANS["recipe"][recipe]["settings"]
    return settings


def recipe_flags(recipe: str, generation: str) -> list[str]:
    """LIBTPU_INIT_ARGS of a recipe on a generation."""
    flags: list[str] = _flags_of(recipe, generation).get("flags", [])
    return [flag.format(scoped_vmem_limit_kib=PLANS["scoped_vmem_limit_kib"].get(generation)) for flag in flags]


def recipe_fingerprint(recipe: str, generation: str) -> str:
    """Name the settings and flags that a recipe has on a generation, so that a row of older ones can be told."""
    parts = [recipe_settings(recipe), recipe_flags(recipe, generation)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


def usable_gib(generation: str) -> float:
    """GiB of HBM a device that a plan may use: what the compiler grants, less HEADROOM."""
    return float(GENERATIONS[generation]["hbm_gib_per_device"]) * (1 - HEADROOM)


def state_gib(model: str, generation: str, topology: str) -> float:
    """GiB a device of weights and the two moments of Adam, 4 bytes each, sharded over all devices of a slice."""
    return float(MODELS[model]["parameters_b"]) * 1e9 * 12 / slice_of(generation, topology).devices / 2**30


def estimated_gib(
    model: str, generation: str, topology: str, batch: float, sequence: int | None = None, recipe: str = "plain"
) -> float:
    """GiB of HBM a device that a step takes, by a closed formula; bench/formula.py prints its error.

    The state; what the backward pass keeps of each layer; and what is alive where most is: at the loss, logits and
    the output head with its gradient; within a layer, all gradients, the layer's own weights and gradients, whole, its
    activations and those of its experts. Collectives on the SparseCores have the gradients alive at the loss too.
    `sequence` is in tokens.
    """
    record, counted, flags = MODELS[model], PLANS["recipe"][recipe], _flags_of(recipe, generation)
    tokens = batch * (sequence or PLANS["default"]["sequence_length"])
    parameters, embedding = record["parameters_b"] * 1e9, record["vocab_size"] * record["emb_dim"]
    gradients = 4 * parameters / slice_of(generation, topology).devices
    kept = 2 * record["layers"] * (record["emb_dim"] + counted["saved"] * record["attention_dim"]) * tokens
    logits = flags.get("logits", counted["logits"]) * record["vocab_size"] * tokens
    loss = logits + HEAD_BYTES * embedding + (gradients if flags.get("gradients_at_loss") else 0)
    weights = max(parameters - embedding, 0) / record["layers"]
    # Three matrices an expert; models with experts in some layers only have fewer a layer than that.
    routed = min(weights, record.get("experts", 0) * 3 * record["emb_dim"] * record.get("expert_mlp_dim", 0))
    of_expert = sum(size * record.get(name, 0) for name, size in TOKEN_EXPERT_BYTES.items())
    of_token = TOKEN_BYTES * record["emb_dim"] + record.get("experts_per_token", 0) * of_expert
    layer = gradients + LAYER_BYTES * (weights - routed) + EXPERT_BYTES * routed + of_token * tokens
    return state_gib(model, generation, topology) + float(kept + max(loss, layer)) / 2**30


def _room_for_slices_gib(model: str, generation: str, topology: str) -> float:
    """GiB a device that a plan of one slice has to leave free to be taken for several."""
    return float(MODELS[model]["parameters_b"]) * 1e9 * SLICES_BYTES / slice_of(generation, topology).devices / 2**30


def largest_batch(model: str, generation: str, topology: str, recipe: str, gib: float) -> float:
    """The largest whole batch a device that the closed formula puts into `gib`, at most LARGEST_BATCH; 0: none."""
    batches = range(LARGEST_BATCH, 0, -1)
    fits = (b for b in batches if estimated_gib(model, generation, topology, b, recipe=recipe) <= gib)
    return float(next(fits, 0))


def can_fit(model: str, generation: str, topology: str) -> bool:
    """Whether a plan fits, or may fit: one that was compiled, or what the closed formula says, which is not exact.

    For another slice than those in the table, the smallest batch counts.
    """
    rows = _rows(model, generation, topology, 1)
    if any(_fits(row) for row in rows):
        return True
    if any(row["recipe"] == "plain" and row["problem"] == "hbm" for row in rows):
        return False
    return estimated_gib(model, generation, topology, 1) <= usable_gib(generation) * (1 + FORMULA_ERROR)


def smallest_topology(model: str, generation: str) -> str:
    """The smallest slice of a generation that a model fits on, "" when there is none."""
    return next((name for name in topologies(generation) if can_fit(model, generation, name)), "")


def _rows(model: str, generation: str, topology: str, num_slices: int) -> list[dict[str, str]]:
    model = MODELS[model].get("plans_of", model)
    return [
        row
        for row in COMPILED
        if (row["model"], row["generation"], row["topology"]) == (model, generation, topology)
        and int(row["num_slices"]) == num_slices
    ]


def _fits(row: dict[str, str], room_gib: float = 0.0) -> bool:
    return not row["problem"] and float(row["hbm_gib"]) + room_gib <= usable_gib(row["generation"])


def plan_for(model: str, generation: str, topology: str, num_slices: int) -> Plan:
    """The best plan of this job: compiled for it, else for the largest smaller slice, else the plain one."""
    sizes = topologies(generation)
    for size in reversed(sizes[: sizes.index(topology) + 1]):
        for slices in dict.fromkeys((num_slices, 1)):
            room = 0.0 if slices == num_slices else _room_for_slices_gib(model, generation, topology)
            rows = [row for row in _rows(model, generation, size, slices) if _fits(row, room)]
            if size != topology or slices != num_slices:
                # What fits one slice fits a larger one, whose devices hold less of the state; the gain is not known.
                rows = [row for row in rows if row["recipe"] != "plain"]
            if rows:
                best = max(rows, key=lambda row: float(row["tokens_per_second"]))
                return _plan(best, exact=size == topology and slices == num_slices)
    default = PLANS["default"]
    gib = estimated_gib(model, generation, topology, default["per_device_batch_size"])
    limit = GENERATIONS[generation]["hbm_gib_per_device"]
    return Plan(
        default["sequence_length"],
        default["per_device_batch_size"],
        "fsdp=-1",
        {},
        [],
        f"{default['source']}. Not compiled for this slice: a closed formula puts it at {gib:.1f} of {limit:g} GiB a "
        "device; `make preflight` tells",
        False,
        gib,
        0,
    )


def _plan(row: dict[str, str], exact: bool) -> Plan:
    """The plan that a row of the table stands for; `exact` when the row is of the very job."""
    shape = slice_of(row["generation"], row["topology"])
    batch = float(row["per_device_batch_size"])
    slices = "" if row["num_slices"] == "1" else f"{row['num_slices']} x "
    source = (
        f"Compiled for {slices}{shape.compile_topology} with libtpu {row['libtpu']}, {row['date']}: "
        f"{float(row['hbm_gib']):.1f} of {shape.hbm_gib_per_device:g} GiB a device. By the compiler's cycles "
        f"{row['tokens_per_second']} tokens/s a device, {float(row['mfu']):.1%} MFU: an estimate, not a measurement"
    )
    if not exact:
        source += ". Not compiled for this run's slices: `make preflight` tells"
    return Plan(
        int(row["sequence_length"]),
        int(batch) if batch.is_integer() else batch,
        "fsdp=-1",
        recipe_settings(row["recipe"]),
        recipe_flags(row["recipe"], row["generation"]),
        source,
        exact,
        float(row["hbm_gib"]),
        int(row["tokens_per_second"]) if exact else 0,
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
            batch = PLANS["default"]["per_device_batch_size"]
    else:
        number = float(per_device_batch_size)
        batch = int(number) if number.is_integer() else number
    if (sequence, batch, ici_parallelism) == plan[:3]:
        return plan
    gib = estimated_gib(model, generation, topology, batch, sequence)
    source = f"{PLANS['default']['source']}. Not compiled for these answers: `make preflight` tells whether they fit"
    return Plan(sequence, batch, ici_parallelism, {}, [], source, False, gib, 0)


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
