"""From what the compiler says of a step (ops/compile_step.py) to its time and speed: an estimate, not a measurement.

Two answers. Lower bounds: a step takes at least as long as its arithmetic at the peak, its HBM traffic at the listed
bandwidth, and its collectives over ICI and DCN. The cycle model: libtpu's own cycles of every TensorCore instruction at
the generation's clock, plus attention kernels, plus the collectives for which the TensorCore waits.

Fitted constants, all in `FITTED`: the throughput of the attention kernels, to two measured steps of v6e (the second
with an older compiler). The rest is the compiler's count or a listed figure of the hardware. Standard library only.
"""

import dataclasses
import math
from typing import Any

from ops.compile_step import Result
from ops.hlo import Collective, Kernel

FITTED = {
    # Executed FLOP/s of splash attention over the ceiling that the head's dimension leaves of the peak; by the kernel's
    # smallest block. Chosen so that the cycle model gives the two known steps: llama3-8b on v6e-16 with fsdp 4 x
    # tensor 4 and blocks of 512 takes 1.100 s (published by Google), and the published recipe of llama3.1-8b on v6e-16
    # with blocks of 2048 takes 3.393 s. Other generations and dimensions of heads take the same shares, unproven.
    "attention_share_of_ceiling": {512: 0.523, 1024: 0.817},
}
# Megablox, the kernel that multiplies by experts: assumed, since no measured step is known for it.
ASSUMED = {"expert_matmul_share_of_peak": 0.6}
# Side of a matrix unit: smaller heads leave a part of it idle.
MXU_SIDE = {"v4": 128, "v5e": 128, "v5p": 128, "v6e": 256, "tpu7x": 256}
# The two devices of a tpu7x chip are linked about six times as fast as chips over one ICI link (Google's page on it).
CHIP_LINKS = 6


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One JAX device of a generation. Bandwidths in GB/s."""

    generation: str
    peak_tflops: float
    hbm_gib: float
    """What the compiler lets one device use."""
    hbm_gbps: float
    ici_link_gbps: float
    """What one ICI link of a chip carries one way."""
    dcn_gbps_per_chip: float
    """0: none is published."""
    clock_ghz: float
    devices_per_chip: int

    @classmethod
    def of(cls, described: Any) -> "Hardware":
        """Return the device that run.env describes; the tables that run.env comes from have the same names."""
        return cls(
            generation=described.generation,
            peak_tflops=described.peak_tflops_per_device,
            hbm_gib=described.hbm_gib_per_device,
            hbm_gbps=described.hbm_gbps_per_device,
            ici_link_gbps=described.ici_link_gbps,
            dcn_gbps_per_chip=described.dcn_gbps_per_chip,
            clock_ghz=described.clock_ghz,
            devices_per_chip=described.devices_per_host // described.chips_per_host,
        )


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One step on one device, by the compiler's figures. Times in seconds, amounts a device and step."""

    compute_bound: float
    hbm_bound: float
    ici_bound: float
    dcn_bound: float
    binds: str
    """The largest of the four: `compute`, `HBM`, `ICI` or `DCN`."""
    step: float
    """By the cycle model."""
    tensorcore: float
    """Of that: libtpu's cycles at the clock."""
    attention: float
    """Of that: attention and other kernels without cycles of their own."""
    waits: float
    """Of that: collectives for which the TensorCore waits, and what asynchronous ones take longer than the rest."""
    tokens_per_second: float
    mfu: float
    """Model FLOP utilisation as MaxText prints it (causal attention), 0 to 1."""
    matmul_tflop: float
    kernel_tflop: float
    hbm_gb: float
    host_gb: float
    ici_gb: float
    dcn_gb: float
    ici_gb_by_mode: dict[str, float]
    """`sync`, `async`, `sparsecore`."""
    unsure: list[str]
    """What makes this estimate less sure than usual, for people."""


def estimate(result: Result, hardware: Hardware) -> Estimate:
    """Return bounds and step time of a compiled step on `hardware`."""
    totals = result.totals
    unsure = [f"the trip count of loop {name} is not known: counted once" for name in totals.unknown_loops]
    attention_seconds, kernel_flops = 0.0, 0.0
    # The fused backward kernel does the gradient of the queries as well, so no kernel of its own does.
    fused = not any(_attention_phase(kernel) == "dq" for kernel in totals.kernels)
    for kernel in totals.kernels:
        flops, share, note = _kernel(kernel, fused, result.settings, hardware)
        kernel_flops += flops * kernel.count
        if kernel.estimated_cycles:
            attention_seconds += kernel.count * kernel.estimated_cycles / (hardware.clock_ghz * 1e9)
        else:
            attention_seconds += kernel.count * flops / (share * hardware.peak_tflops * 1e12)
        if note and note not in unsure:
            unsure.append(note)

    times = {"sync": 0.0, "async": 0.0, "sparsecore": 0.0, "dcn": 0.0}
    amounts = dict.fromkeys(times, 0.0)
    for collective in totals.collectives:
        network = "dcn" if collective.dcn else collective.mode
        amounts[network] += collective.bytes * collective.count
        times[network] += collective.count * _collective_seconds(collective, hardware)
    if amounts["dcn"] and not hardware.dcn_gbps_per_chip:
        unsure.append(f"no bandwidth between slices is published for {hardware.generation}: DCN is not in the bounds")

    tensorcore = totals.cycles / (hardware.clock_ghz * 1e9)
    busy = tensorcore + attention_seconds + times["sync"]
    # What runs beside the TensorCore is hidden as long as it is shorter.
    step = max(busy, times["async"] + times["sync"], times["sparsecore"] + times["sync"], times["dcn"])
    flops_per_cycle = hardware.peak_tflops * 1e3 / hardware.clock_ghz
    if totals.best_flops_per_cycle > 1.02 * flops_per_cycle:
        unsure.append(
            f"an instruction is said to do {totals.best_flops_per_cycle:,.0f} FLOP a cycle, more than the "
            f"{flops_per_cycle:,.0f} of {hardware.generation}: the compiler counts cycles of another clock"
        )
    bounds = {
        "compute": (totals.matmul_flops + kernel_flops) / (hardware.peak_tflops * 1e12),
        "HBM": totals.hbm_bytes / (hardware.hbm_gbps * 1e9),
        "ICI": times["sync"] + times["async"] + times["sparsecore"],
        "DCN": times["dcn"],
    }
    return Estimate(
        compute_bound=bounds["compute"],
        hbm_bound=bounds["HBM"],
        ici_bound=bounds["ICI"],
        dcn_bound=bounds["DCN"],
        binds=max(bounds, key=lambda name: bounds[name]),
        step=step,
        tensorcore=tensorcore,
        attention=attention_seconds,
        waits=step - tensorcore - attention_seconds,
        tokens_per_second=result.tokens / step,
        mfu=result.model_tflops / step / hardware.peak_tflops,
        matmul_tflop=totals.matmul_flops / 1e12,
        kernel_tflop=kernel_flops / 1e12,
        hbm_gb=totals.hbm_bytes / 1e9,
        host_gb=totals.host_bytes / 1e9,
        ici_gb=(amounts["sync"] + amounts["async"] + amounts["sparsecore"]) / 1e9,
        dcn_gb=amounts["dcn"] / 1e9,
        ici_gb_by_mode={mode: amounts[mode] / 1e9 for mode in ("sync", "async", "sparsecore")},
        unsure=unsure,
    )


def _collective_seconds(collective: Collective, hardware: Hardware) -> float:
    """Return how long one run of a collective keeps its network busy."""
    if collective.dcn:
        rate = hardware.dcn_gbps_per_chip
        return collective.bytes * hardware.devices_per_chip / (rate * 1e9) if rate else 0.0
    if collective.axes == 0:  # between the devices of one chip
        return collective.bytes / (CHIP_LINKS * hardware.ici_link_gbps * 1e9)
    # A transfer to a neighbour uses one link; the others spread over the links of all axes that they span. The devices
    # of a chip share them.
    links = 1 if collective.kind == "collective-permute" else collective.axes
    return collective.bytes * hardware.devices_per_chip / (links * hardware.ici_link_gbps * 1e9)


def _kernel(kernel: Kernel, fused: bool, settings: dict[str, Any], hardware: Hardware) -> tuple[float, float, str]:
    """Return the FLOPs of one run of a kernel, the share of the peak that it reaches, and what is unsure about it."""
    if "gmm" in _names(kernel):
        floats = [dims for kind, dims in kernel.operands if kind.startswith(("bf", "f"))]
        matrices = [dims for dims in floats if len(dims) in (2, 3)]
        results = [dims for kind, dims in kernel.results if kind.startswith(("bf", "f")) and len(dims) in (2, 3)]
        if len(matrices) >= 2 and results:
            return _grouped_flops(matrices, results[0]), ASSUMED["expert_matmul_share_of_peak"], _EXPERTS_UNSURE
    if phase := _attention_phase(kernel):
        flops, block, dimension = _attention(kernel, phase, fused, settings)
        shares = FITTED["attention_share_of_ceiling"]
        small, large = shares[512], shares[1024]
        share = small + (large - small) * min(1.0, max(0.0, (block - 512) / 512))
        ceiling = min(1.0, dimension / MXU_SIDE[hardware.generation])
        unsure = "" if hardware.generation == "v6e" else _ATTENTION_UNSURE.format(hardware.generation)
        return flops, share * ceiling, unsure
    return 0.0, 1.0, f"kernel {kernel.name} is not known: its time is not in the step"


_ATTENTION_UNSURE = "the speed of attention is fitted to v6e only and carried over to {}"
_EXPERTS_UNSURE = "the speed of the expert kernel is assumed, not fitted: no measured step is known for it"


def _grouped_flops(matrices: list[tuple[int, ...]], result: tuple[int, ...]) -> float:
    """Return the FLOPs of a product with one matrix a group: rows are shared out, so groups do not multiply them."""
    if len(result) == 3:  # gradient of the weights: every row of both inputs once
        rows = matrices[0][-1] if matrices[0][-1] == matrices[1][0] else matrices[0][0]
        return 2.0 * rows * result[1] * result[2]
    depth = matrices[0][-1]
    return 2.0 * result[0] * result[1] * depth


def _names(kernel: Kernel) -> str:
    """Return the kernel's own name and the end of its place in the program, lower case."""
    return " ".join([kernel.name, *kernel.op_name.rsplit("/", 3)[1:]]).lower()


def _attention_phase(kernel: Kernel) -> str:
    """Return `forward`, `dkv` (which does dq as well where it is fused) or `dq`; empty for another kernel."""
    lowered = _names(kernel)
    if not any(word in lowered for word in ("splash", "flash", "mha", "mqa")):
        return ""
    if "dkv" in lowered:
        return "dkv"
    if "dq" in lowered:
        return "dq"
    return "forward"


def _attention(kernel: Kernel, phase: str, fused: bool, settings: dict[str, Any]) -> tuple[float, float, int]:
    """Return the FLOPs that a splash kernel executes, its smallest block, and the dimension of a head.

    The kernel works on whole blocks: all that touch the causal triangle, or as many as its mask's grid is wide. A mask
    that leaves more out (documents packed into one sequence) is not reckoned with.
    """
    query, key, value = [dims for kind, dims in kernel.operands if kind.startswith(("bf", "f"))][:3]
    *batch, queries, width = query
    keys, value_width = key[-2], value[-1]
    side = {"forward": "", "dq": "_dq"}.get(phase, "_dkv")
    options = settings | {f"sa_{name}": size for name, size in kernel.options.items()}
    block_q = min(queries, int(options.get(f"sa_block_q{side}") or 512))
    block_kv = min(keys, int(options.get(f"sa_block_kv{side}") or 512))
    inner = min(block_kv, int(options.get(f"sa_block_kv{side}_compute") or block_kv))
    rows, columns = math.ceil(queries / block_q), math.ceil(keys / block_kv)
    kind, grid = kernel.operands[0]
    known = kind.startswith(("s", "u")) and len(grid) == 3
    if side == "_dkv":
        widest = grid[1] if known else rows
        blocks = sum(min(rows - block_kv * column // block_q, widest) for column in range(columns))
    else:
        widest = grid[2] if known else columns
        blocks = sum(min(math.ceil((row + 1) * block_q / block_kv), widest) for row in range(rows))
    # Multiply-adds over the two dimensions: scores and their gradient over that of query and key, the rest over values.
    depth = {
        "forward": width + value_width,
        "dq": 2 * width + value_width,
        "dkv": (3 if fused else 2) * width + 2 * value_width,
    }[phase]
    return 2.0 * math.prod(batch) * blocks * block_q * block_kv * depth, min(block_q, inner), width
