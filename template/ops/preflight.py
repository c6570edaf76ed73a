"""Compile the run's real train step for its real slice before paying: does it fit, how fast is it, what does it cost.

    make preflight ARGS="[config.yml] [key=value ...] [--force] [--keep] [--no-search]"

No TPU and no cloud account is needed: the TPU compiler runs on any Linux x86_64 machine. Everything it prints is the
compiler's estimate, not a measurement. Results lie in build/preflight; an unchanged run is answered from there.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import yaml

from ops import compile_step, estimate, hlo, libtpu, run_env, terminal
from ops.compile_step import Failure, Request, Result
from ops.run_env import ROOT, RunEnv

FOLDER = ROOT / "build" / "preflight"
CONFIG = ROOT / "config" / "train.yml"
MAX_CHANGES = 3


class PreflightError(terminal.UserError):
    """Preflight cannot go on; the message says why and what to do."""


def cache_key(request: Request, generation: str) -> str:
    """Return a name for everything that decides about the compiled step: config, overrides, flags, versions, code."""
    parts = [
        _fingerprint(request),
        generation,
        libtpu.versions(),
        [Path(module.__file__ or "").read_text(encoding="utf-8") for module in (compile_step, hlo)],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _fingerprint(request: Request) -> str:
    config = Path(request.config).read_text(encoding="utf-8")
    flags = list(request.flags)
    return libtpu.fingerprint(config, list(request.overrides), flags, request.compile_topology, request.num_slices)


class Compiler:
    """Compiles requests, each once: an answer that is in build/preflight is taken from there."""

    def __init__(self, run: RunEnv, force: bool) -> None:
        self.run = run
        self.force = force
        self.flags_checked: tuple[str, ...] | None = None

    def folder(self, request: Request) -> Path:
        """Return where the answer to `request` is kept."""
        return FOLDER / "cache" / cache_key(request, self.run.generation)

    def compile(self, request: Request, what: str) -> tuple[Result | Failure, bool]:
        """Return the answer, and whether it was found rather than compiled. Raises PreflightError."""
        folder = self.folder(request)
        answer = folder / "cached.json"
        kept = not request.keep or bool(libtpu.kept_step(_fingerprint(request))[0])
        if answer.exists() and kept and not self.force:
            return compile_step.from_json(json.loads(answer.read_text(encoding="utf-8"))), True
        if reason := libtpu.missing():
            raise PreflightError(reason)
        with terminal.Progress() as progress:
            if self.flags_checked != request.flags:
                progress.update("checking the flags with libtpu")
                if reason := libtpu.check_flags(list(request.flags), self.run.generation):
                    raise PreflightError(reason)
                self.flags_checked = request.flags
            if request.keep:
                Path(request.keep).parent.mkdir(parents=True, exist_ok=True)
                # Never a new step beside an old note.
                libtpu.KEPT_STEP.with_suffix(".json").unlink(missing_ok=True)
            result = compile_step.compile(
                request, folder, progress=lambda text: progress.update(f"compiling {what}", text)
            )
        if request.keep and isinstance(result, Result):
            libtpu.note_kept_step(_fingerprint(request))
        if isinstance(result, Result) or result.kind == "hbm":
            partial = answer.with_suffix(".partial")
            partial.write_text(json.dumps(compile_step.to_json(result)), encoding="utf-8")
            partial.rename(answer)
        return result, False


def bar(parts: list[float], limit: float, width: int = 40) -> str:
    """Return `parts` of `limit` as a bar of `width` characters, each part with a character of its own."""
    filled, text = 0.0, ""
    for part, mark in zip(parts, "#=+", strict=False):
        filled += part
        text += mark * (min(width, round(width * filled / limit)) - len(text))
    return text.ljust(width, ".")


def price(run: RunEnv, seconds: float) -> str:
    """Return hours and indicative money for `seconds` on all slices of the run."""
    hours = seconds / 3600
    text = f"{hours:,.2f} h" if hours < 100 else f"{hours:,.0f} h"
    if not run.price_per_chip_hour:
        return f"{text} (no price is published for {run.generation} {run.capacity})"
    chips = run.chips_per_slice * run.num_slices
    return f"{text}, about {hours * chips * float(run.price_per_chip_hour):,.2f} USD for the chips"


def table(run: RunEnv, result: Result, found: estimate.Estimate, steps: int) -> list[str]:
    """Return what people read, a line each."""
    memory = result.memory
    gib = {name: getattr(memory, name) / 2**30 for name in ("arguments", "temporaries", "code", "total", "host")}
    limit = run.hbm_gib_per_device
    tokens = result.tokens * result.devices
    bounds = {"compute": found.compute_bound, "HBM": found.hbm_bound, "ICI": found.ici_bound, "DCN": found.dcn_bound}
    modes = ", ".join(f"{amount:.1f} {mode}" for mode, amount in found.ici_gb_by_mode.items() if amount >= 0.05)
    rows = [
        (
            "HBM",
            f"{gib['total']:.2f} of {limit:g} GiB a device, {limit - gib['total']:.2f} free  "
            f"{bar([gib['arguments'], gib['temporaries'], gib['code']], limit)}",
        ),
        (
            "",
            f"{gib['arguments']:.2f} arguments (#: parameters, optimizer state, batch), "
            f"{gib['temporaries']:.2f} temporaries (=), {gib['code']:.2f} code (+)",
        ),
        *([("host memory", f"{gib['host']:.2f} GiB a device for what is offloaded")] if memory.host else []),
        (
            "work",
            f"{found.matmul_tflop:.1f} TFLOP of matmuls, {found.kernel_tflop:.1f} in kernels, "
            f"{found.hbm_gb:.0f} GB through HBM, a device and step",
        ),
        (
            "collectives",
            f"{found.ici_gb:.1f} GB over ICI{f' ({modes})' if modes else ''}, {found.dcn_gb:.1f} GB over DCN",
        ),
        (
            "lower bounds",
            ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in bounds.items()) + f": {found.binds} binds",
        ),
        (
            "step",
            f"{found.step * 1e3:.0f} ms: {found.tensorcore * 1e3:.0f} TensorCore, {found.attention * 1e3:.0f} kernels, "
            f"{found.waits * 1e3:.0f} waiting for collectives",
        ),
        (
            "speed",
            f"{found.tokens_per_second:,.0f} tokens/s/device, {found.mfu:.1%} MFU "
            f"({result.model_tflops / found.step:.0f} TFLOP/s/device), {tokens:,} tokens a step",
        ),
        (f"{steps:,} steps", price(run, steps * found.step)),
        ("1e9 tokens", price(run, 1e9 / tokens * found.step)),
    ]
    return [f"  {name:<13}{text}" for name, text in rows]


def settings_of(config: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the config's values with the overrides applied, typed as YAML has them."""
    values = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    for override in overrides:
        key, text = override.split("=", 1)
        values[key] = yaml.safe_load(text)
    return values


def _picture(file: Path, run: RunEnv, result: Result, found: estimate.Estimate) -> None:
    """Draw HBM a device as a stacked bar against the limit, and the roofline, into `file` (PNG)."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), width_ratios=[1, 2], layout="constrained")
    libtpu_version = result.versions.get("libtpu", "")
    figure.suptitle(
        f"{run.model} on {run.slice_text}: estimate of the TPU compiler (libtpu {libtpu_version}), not a measurement"
    )
    bottom = 0.0
    for name, color in (("arguments", "tab:blue"), ("temporaries", "tab:orange"), ("code", "tab:gray")):
        height = getattr(result.memory, name) / 2**30
        left.bar(["a device"], [height], bottom=bottom, color=color, label=f"{name} {height:.2f}", width=0.5)
        bottom += height
    limit = run.hbm_gib_per_device
    left.axhline(limit, color="tab:red", label=f"usable {limit:g}")
    left.set(ylabel="HBM, GiB", ylim=(0, 1.45 * max(limit, bottom)), xlim=(-0.8, 0.8))
    left.legend(loc="upper center")

    flops, size = (found.matmul_tflop + found.kernel_tflop) * 1e12, found.hbm_gb * 1e9
    ridge = run.peak_tflops_per_device * 1e3 / run.hbm_gbps_per_device
    here = flops / size if size else ridge
    ends = [min(here, ridge) / 8, ridge, max(here, ridge) * 8]
    roof = [min(run.peak_tflops_per_device, intensity * run.hbm_gbps_per_device / 1e3) for intensity in ends]
    right.loglog(ends, roof, color="black", label=f"{run.generation}: {run.peak_tflops_per_device:g} TFLOP/s, HBM")
    reached = flops / found.step / 1e12
    right.plot(
        [here], [reached], "o", color="tab:orange", label=f"the step: {reached:.0f} TFLOP/s, {found.mfu:.0%} MFU"
    )
    network = max(found.ici_bound, found.dcn_bound)
    if network and flops / network / 1e12 < 20 * run.peak_tflops_per_device:
        which = "ICI" if found.ici_bound >= found.dcn_bound else "DCN"
        level = flops / network / 1e12
        right.axhline(level, color="tab:green", linestyle=":", label=f"{which} alone allows {level:.0f} TFLOP/s")
    right.set(xlabel="FLOP a byte of HBM traffic", ylabel="TFLOP/s a device (hardware FLOP)")
    right.legend(loc="lower right")
    figure.savefig(file, dpi=110)
    plt.close(figure)


@dataclasses.dataclass(frozen=True)
class Change:
    """A change after which the step fits."""

    command: str
    result: Result


def _round(size: float) -> int:
    """Return the largest whole number up to `size` of three binary digits, then zeros: sizes that compile well."""
    unit = 1 << max(0, int(size).bit_length() - 3)
    return int(size) // unit * unit


def candidates(settings: dict[str, Any], failure: Failure) -> list[list[list[str]]]:
    """Return for each kind of change what to try, closest to the run first, each as overrides."""
    share = failure.limit_gib / failure.needed_gib if failure.needed_gib else 0.5
    kinds: list[list[list[str]]] = []

    batch = float(settings.get("per_device_batch_size") or 1)
    # A little below what memory alone would allow, since close to the limit the compiler takes long and often fails.
    smaller = sorted({_round(batch * share * 0.95), *(int(batch / 2**power) for power in (1, 2, 3, 4))}, reverse=True)
    kinds.append([[f"per_device_batch_size={size}"] for size in smaller if 1 <= size < batch])

    policies = []
    if settings.get("remat_policy", "full") != "full":
        policies.append(["remat_policy=full"])
    policies.append(["remat_policy=custom", "decoder_layer_input=offload"])
    kinds.append(policies)

    length = int(settings.get("max_target_length") or 2048)
    lengths = [length // 2**power for power in (1, 2, 3) if length // 2**power >= 512]
    kinds.append([[f"max_target_length={short}"] for short in lengths])
    return kinds


def larger_slices(run: RunEnv) -> list[tuple[str, str]]:
    """Return (compile topology, topology) of the larger slices that MaxText knows, up to 8 times as large."""
    from ops.small_model import maxtext_folder

    table = (maxtext_folder() / "utils" / "accelerator_to_spec_map.py").read_text(encoding="utf-8")
    prefix = run.compile_topology.rsplit("-", 1)[0]
    here = run.devices_per_slice
    found = []
    for name, shape, devices in re.findall(
        rf'"({prefix}-\d+)": SystemCharacteristics\(\s*"tpu",\s*"\w+:([\dx]+)",\s*"\w+",\s*\([\d, ]+\),\s*(\d+),', table
    ):
        if here < int(devices) <= 8 * here and int(devices) % here == 0:
            found.append((int(devices), name, shape))
    return [(name, shape) for _, name, shape in sorted(found)]


def changes_that_fit(
    run: RunEnv, request: Request, settings: dict[str, Any], failure: Failure, compiler: Compiler
) -> list[Change]:
    """Return up to MAX_CHANGES changes that fit, of different kinds, each found by compiling it."""
    found: list[Change] = []
    given = [*request.overrides]

    def command(overrides: list[str]) -> str:
        keys = {override.split("=", 1)[0] for override in overrides}
        kept = [override for override in given if override.split("=", 1)[0] not in keys]
        return f'make preflight ARGS="{" ".join([*kept, *overrides])}"'

    for kind in candidates(settings, failure):
        for overrides in kind:
            keys = {override.split("=", 1)[0] for override in overrides}
            kept = [override for override in given if override.split("=", 1)[0] not in keys]
            trial = dataclasses.replace(request, overrides=(*kept, *overrides), keep="")
            result, _ = compiler.compile(trial, " ".join(overrides))
            if isinstance(result, Result) and fits(run, result):
                found.append(Change(command(overrides), result))
                break
        if len(found) == MAX_CHANGES:
            return found
    if settings.get("ici_fsdp_parallelism", -1) == -1:
        for name, shape in larger_slices(run):
            trial = dataclasses.replace(request, compile_topology=name, keep="")
            result, _ = compiler.compile(trial, f"on {run.generation} {shape}")
            if isinstance(result, Result) and fits(run, result):
                text = f"make reconfigure ARGS=topology={shape}"
                found.append(Change(text, result))
                break
    return found


def fits(run: RunEnv, result: Result) -> bool:
    """Whether the step stays within what the compiler lets a device use."""
    return result.memory.total <= run.hbm_gib_per_device * 2**30


def preflight(config: Path, overrides: list[str], *, force: bool, keep: bool, search: bool) -> int:
    """Compile, print, save; return the exit code: 0 when it fits, 1 when not. Raises PreflightError."""
    run = run_env.load()
    began = time.monotonic()
    settings = settings_of(config, overrides)
    request = Request(
        config=str(config.resolve()),
        overrides=tuple(overrides),
        flags=tuple(libtpu.read_flags()),
        compile_topology=run.compile_topology,
        num_slices=run.num_slices,
        keep=str(libtpu.KEPT_STEP) if keep else "",
    )
    if keep and int(settings.get("eval_interval") or -1) > 0:
        raise PreflightError("--keep: MaxText runs a kept step without evaluation; set eval_interval=-1 or do not keep")
    compiler = Compiler(run, force)
    terminal.console.print(
        f"Preflight of {settings.get('model_name', run.model)} on {run.slice_text}: "
        "what the TPU compiler estimates, nothing here is measured"
    )
    result, cached = compiler.compile(request, f"the step for {run.compile_topology}")
    report: dict[str, Any] = {
        "estimate": True,
        "run": dataclasses.asdict(run),
        "overrides": overrides,
        "flags": request.flags,
    } | compile_step.to_json(result)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if isinstance(result, Failure) and result.kind != "hbm":
        raise PreflightError(_advice(run, result))
    if isinstance(result, Result) and fits(run, result):
        found = estimate.estimate(result, estimate.Hardware.of(run))
        report["figures"] = dataclasses.asdict(found)
        for line in table(run, result, found, int(settings.get("steps") or run.steps)):
            terminal.console.print(line)
        for text in found.unsure:
            terminal.notice(text)
        picture = compiler.folder(request) / "report.png"
        if not picture.exists():
            _picture(picture, run, result, found)
        shutil.copyfile(picture, FOLDER / "report.png")
        took = f"compiled in {time.monotonic() - began:.0f} s with {result.peak_memory_gib:.1f} GiB of memory here"
        where = f"{FOLDER.relative_to(ROOT)}/report.json and report.png"
        terminal.console.print(f"It fits ({'from the cache' if cached else took}). More in {where}")
        _save(report)
        return 0
    if isinstance(result, Result):
        needed = result.memory.total / 2**30
        result = Failure(
            "hbm",
            f"the step takes {needed:.2f} GiB of HBM a device, and a device has {run.hbm_gib_per_device:g}: "
            f"{needed - run.hbm_gib_per_device:.2f} GiB are missing",
            needed,
            run.hbm_gib_per_device,
        )
    terminal.error(f"it does not fit: {result.message}")
    if search:
        terminal.notice("looking for changes that fit, by compiling them; --no-search leaves that out")
    changes = changes_that_fit(run, request, settings, result, compiler) if search else []
    for change in changes:
        found = estimate.estimate(change.result, estimate.Hardware.of(run))
        terminal.console.print(
            f"  fits in {change.result.memory.total / 2**30:.2f} GiB, "
            f"{found.tokens_per_second:,.0f} tokens/s/device:  {change.command}"
        )
    if search and not changes:
        terminal.console.print("  none of the changes that were compiled fits: take a larger slice or a smaller model")
    _save(report | {"changes": [change.command for change in changes]})
    return 1


def _advice(run: RunEnv, failure: Failure) -> str:
    if failure.kind == "mesh":
        return (
            f"{failure.message}. run.env has {run.devices_per_slice} devices a slice (ici_*_parallelism) and "
            f"{run.num_slices} slice(s) (dcn_*_parallelism); an axis of -1 takes what is left"
        )
    return failure.message


def _save(report: dict[str, Any]) -> None:
    partial = FOLDER / "report.json.partial"
    partial.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    partial.rename(FOLDER / "report.json")


def main() -> int:
    """Preflight; exit code 0 when the step fits, 1 when not or refused, 2 for wrong arguments, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="make preflight", description=__doc__.split("\n\n")[0])
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as train.py takes them; first maybe a config")
    parser.add_argument("--force", action="store_true", help="compile again, also what is in the cache")
    parser.add_argument("--keep", action="store_true", help="keep the compiled step in config/compiled for the run")
    parser.add_argument("--no-search", action="store_true", help="when it does not fit, do not look for what does")
    arguments = parser.parse_args()
    overrides: list[str] = arguments.settings
    named = overrides and overrides[0].endswith((".yml", ".yaml")) and "=" not in overrides[0]
    config = Path(overrides.pop(0)) if named else CONFIG
    if not config.is_file():
        terminal.error(f"there is no config {config}")
        return 2
    if wrong := [override for override in overrides if "=" not in override]:
        terminal.error(f"'{wrong[0]}' is no override: give key=value, e.g. per_device_batch_size=2")
        return 2
    try:
        return preflight(config, overrides, force=arguments.force, keep=arguments.keep, search=not arguments.no_search)
    except KeyboardInterrupt:
        terminal.error("interrupted; the compile has been ended")
        raise


if __name__ == "__main__":
    terminal.run(main)
