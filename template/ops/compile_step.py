"""Compile the run's real train step for its real slice with the TPU compiler, in a child process; no TPU is needed.

The child runs MaxText's own `train_compile` with the run's config, overrides and flags, keeps what the compiler says of
memory, and counts the optimized HLO (ops/hlo.py). Standard library and psutil only on this side: MaxText takes 20 s to
import and its memory must go when the compile is done.

    python -m ops.compile_step REQUEST.json     is that child; it writes its answer beside the request
"""

import dataclasses
import difflib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ops import hlo, libtpu

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 3600.0
# Below this the system starts to kill processes, and it may not choose the compile.
MEMORY_RESERVE_GIB = 0.4
_ANSWER, _HLO, _LOG, _PHASE = "answer.json", "step.hlo.gz", "compile.log", "phase"


@dataclasses.dataclass(frozen=True)
class Request:
    """One compile: what train.py would run, and for which slices."""

    config: str
    """Path of the MaxText config."""
    overrides: tuple[str, ...]
    """key=value, as train.py takes them."""
    flags: tuple[str, ...]
    """LIBTPU_INIT_ARGS."""
    compile_topology: str
    """MaxText's name of the slice, e.g. v6e-16."""
    num_slices: int = 1
    keep: str = ""
    """Where to save the compiled step for the run; empty: do not."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """What the compiler plans for one device, in bytes."""

    arguments: int
    """Parameters, optimizer state and batch, alive during the whole step, and results that cannot take their place."""
    temporaries: int
    """The space for activations and everything else that lives for a part of the step, gaps in it included."""
    code: int
    total: int
    """What the step takes of HBM: the three above, which the runtime allocates as they are."""
    peak: int
    """The most that is alive at one moment, by the compiler, also in VMEM; without gaps. For comparison only."""
    host: int
    """The host's memory that one device uses for what is offloaded."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A step that compiles: what it needs and does, a JAX device and a step."""

    memory: Memory
    totals: hlo.Totals
    tokens: int
    """Tokens that one device trains on in a step."""
    model_tflops: float
    """MaxText's own count of the model's TFLOP (causal attention), a device and a step: what its MFU is made of."""
    parameters: int
    settings: dict[str, Any]
    """MaxText's settings that the estimate reads, with all defaults filled in."""
    devices: int
    versions: dict[str, str]
    seconds: float
    """Wall time of the child."""
    compile_seconds: float
    """Of that, lowering and compiling."""
    peak_memory_gib: float
    """Resident memory of the child."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A step that does not compile."""

    kind: str
    """`hbm` (it does not fit), `flags`, `mesh`, `key`, `config`, `platform`, `host memory`, `timeout` or `other`."""
    message: str
    """One or two lines: what is wrong and what to do."""
    needed_gib: float = 0.0
    """For `hbm`: what the compiler says that it needs of one device, where it says so."""
    limit_gib: float = 0.0
    """For `hbm`: what one device has."""


# Of MaxText's settings, what the estimate and people want to know of a compiled step.
SETTINGS = (
    "model_name",
    "attention",
    "remat_policy",
    "context",
    "per_device_batch_size",
    "max_target_length",
    "num_decoder_layers",
    "num_query_heads",
    "head_dim",
    "use_tokamax_splash",
    "sa_use_fused_bwd_kernel",
    "sa_block_q",
    "sa_block_kv",
    "sa_block_kv_compute",
    "sa_block_q_dkv",
    "sa_block_kv_dkv",
    "sa_block_kv_dkv_compute",
    "sa_block_q_dq",
    "sa_block_kv_dq",
)


def compile(
    request: Request,
    folder: Path,
    *,
    python: str = sys.executable,
    progress: Callable[[str], None] = lambda text: None,
    timeout: float = TIMEOUT_SECONDS,
) -> Result | Failure:
    """Compile in a child process and return what the compiler says. The child's files and log stay in `folder`.

    `progress` is called twice a second with what the child does. The child is ended after `timeout` seconds, when the
    machine runs out of memory, and when this process is interrupted.
    """
    if python == sys.executable and (reason := libtpu.missing()):
        return Failure("platform", reason)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (_ANSWER, f"{_ANSWER}.partial", _HLO, _PHASE):
        (folder / name).unlink(missing_ok=True)
    (folder / "request.json").write_text(json.dumps(dataclasses.asdict(request), indent=1), encoding="utf-8")
    began = time.monotonic()
    peak, starved = 0.0, 0.0
    with (folder / _LOG).open("w", encoding="utf-8") as log:
        child = subprocess.Popen(
            [python, "-u", "-m", "ops.compile_step", str((folder / "request.json").resolve())],
            cwd=ROOT,
            env=os.environ | libtpu.environment(list(request.flags)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while child.poll() is None:
                time.sleep(0.5)
                available = psutil.virtual_memory().available / 2**30
                try:
                    peak = max(peak, psutil.Process(child.pid).memory_info().rss / 2**30)
                except psutil.Error:
                    continue
                phase = folder / _PHASE
                progress(f"{phase.read_text() if phase.exists() else 'importing MaxText'}, {peak:.1f} GiB of memory")
                if available < MEMORY_RESERVE_GIB:
                    starved = available
                    break
                if time.monotonic() - began > timeout:
                    return Failure("timeout", f"the compile took longer than {timeout:.0f} s and was ended: {log.name}")
        finally:
            child.kill()
            child.wait()
    seconds = time.monotonic() - began
    answer = folder / _ANSWER
    if answer.exists():
        values = json.loads(answer.read_text(encoding="utf-8"))
        return _result(values | {"seconds": round(seconds, 1), "peak_memory_gib": round(peak, 2)})
    if starved or child.returncode == -signal.SIGKILL:
        return Failure(
            "host memory",
            f"this machine has too little memory for the compile: it was ended at {peak:.1f} GiB"
            + (f", with {starved:.1f} GiB left" if starved else " by the system")
            + ". Close programs or use a larger machine (most steps take 2 to 4 GiB)",
        )
    return explain((folder / _LOG).read_text(encoding="utf-8", errors="replace"), child.returncode, folder / _LOG)


def _result(values: dict[str, Any]) -> Result:
    """Return a Result from its JSON."""
    totals = dict(values["totals"])
    totals["collectives"] = [hlo.Collective(**one) for one in totals["collectives"]]
    for one in totals["kernels"]:
        for field in ("operands", "results"):
            one[field] = tuple((kind, tuple(dimensions)) for kind, dimensions in one[field])
    totals["kernels"] = [hlo.Kernel(**one) for one in totals["kernels"]]
    return Result(**values | {"memory": Memory(**values["memory"]), "totals": hlo.Totals(**totals)})


def to_json(answer: Result | Failure) -> dict[str, Any]:
    """Return `answer` as plain values; from_json makes it again."""
    return {"compiles": isinstance(answer, Result)} | dataclasses.asdict(answer)


def from_json(values: dict[str, Any]) -> Result | Failure:
    """Return what to_json was given."""
    values = dict(values)
    return _result(values) if values.pop("compiles") else Failure(**values)


def _gib(number: str, unit: str) -> float:
    return float(number) / {"G": 1.0, "M": 2.0**10, "K": 2.0**20, "": 2.0**30}[unit]


def explain(log: str, returncode: int, file: Path) -> Failure:
    """Return what the log of a failed compile says, as a message for people."""
    if refused := libtpu.refused_flags(log):
        return Failure("flags", refused)
    if "RESOURCE_EXHAUSTED" in log or "CompileTimeHbmOom" in log:
        sizes = re.search(r"Used ([\d.]+)([GMK]?) of ([\d.]+)([GMK]?) hbm", log) or re.search(
            r"\(([\d.]+)([GMK]?)\) exceeds available HBM \(([\d.]+)([GMK]?)\)", log
        )
        needed, limit = (_gib(sizes[1], sizes[2]), _gib(sizes[3], sizes[4])) if sizes else (0.0, 0.0)
        if sizes:
            text = f"the compiler needs {needed:.2f} GiB of HBM a device, and a device has {limit:.2f}"
            return Failure("hbm", f"{text}: {needed - limit:.2f} GiB are missing", needed, limit)
        first = re.search(r"RESOURCE_EXHAUSTED: (.*)", log)
        return Failure("hbm", f"it does not fit into HBM: {first[1][:300] if first else file}")
    if key := re.search(r"MAXTEXT CONFIG ERROR: '([^']+)' not in ", log):
        return Failure("key", f"'{key[1]}' is no key of MaxText{_nearest(key[1], log)}")
    if mesh := re.search(r"(?:AssertionError: |MAXTEXT CONFIG ERROR: )(.*(?:parallelism|mesh)[\s\S]*?)\n(?=\S|$)", log):
        return Failure("mesh", f"the mesh does not match the slice: {' '.join(mesh[1].split())}")
    if wrong := re.search(r"MAXTEXT CONFIG ERROR: (.*)", log):
        return Failure("config", f"MaxText refuses the configuration: {wrong[1].strip()[:600]}")
    errors = re.findall(r"^(?:[\w.]*(?:Error|Exception)): .*$", log, re.MULTILINE)
    last = errors[-1] if errors else next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
    return Failure("other", f"the compile failed with exit code {returncode}: {last.strip()[:600]}. All of it: {file}")


def _nearest(key: str, log: str) -> str:
    known = re.findall(r"'(\w+)'", log[log.find("' not in ") :].split("\n", 1)[0])
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else ": every key stands in its base.yml"


def _child(file: Path) -> None:
    """Compile what `file` asks for and write the answer beside it."""
    request = Request(**json.loads(file.read_text(encoding="utf-8")))
    folder = file.parent

    def phase(text: str) -> None:
        (folder / _PHASE).write_text(text, encoding="utf-8")

    phase("importing MaxText")
    import jax
    from maxtext.trainers.pre_train import train_compile
    from maxtext.utils import accelerator_to_spec_map, maxtext_utils

    phase("reading the configuration")
    compile_with_maxtext = train_compile.jit_and_compile

    def jit_and_compile(*arguments: Any, **keywords: Any) -> Any:
        began = time.monotonic()
        phase("tracing and compiling the step")
        compiled = compile_with_maxtext(*arguments, **keywords)
        seconds = time.monotonic() - began
        phase("counting what the step does")
        state, mesh, config = arguments[1][0], arguments[3], arguments[8]
        text = compiled.as_text()
        with gzip.open(folder / _HLO, "wt", compresslevel=4, encoding="utf-8") as sink:
            sink.write(text)
        spec = accelerator_to_spec_map.get_system_characteristics(request.compile_topology)
        places = [
            hlo.Place(getattr(device, "slice_index", 0) or 0, tuple(device.coords), device.core_on_chip)
            for device in mesh.devices.flatten()
        ]
        memory = compiled.memory_analysis()
        inputs = int(memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
        temporaries, code = int(memory.temp_size_in_bytes), int(memory.generated_code_size_in_bytes)
        answer = {
            "memory": {
                "arguments": inputs,
                "temporaries": temporaries,
                "code": code,
                "total": inputs + temporaries + code,
                "peak": int(memory.peak_memory_in_bytes),
                "host": int(memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes),
            },
            "totals": dataclasses.asdict(hlo.analyze(text, places, tuple(spec.wrap or ()))),
            "tokens": int(maxtext_utils.calculate_tokens_training_per_device(config)),
            "model_tflops": float(maxtext_utils.calculate_tflops_training_per_device(config, log=False)[0]),
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(getattr(state, "model", state))),
            "settings": {name: getattr(config, name) for name in SETTINGS if hasattr(config, name)},
            "devices": len(places),
            "versions": libtpu.versions(),
            "compile_seconds": round(seconds, 1),
        }
        partial = folder / f"{_ANSWER}.partial"
        partial.write_text(json.dumps(answer, default=str), encoding="utf-8")
        return compiled

    train_compile.jit_and_compile = jit_and_compile
    overrides = [
        *request.overrides,
        f"compile_topology={request.compile_topology}",
        f"compile_topology_num_slices={request.num_slices}",
        "jax_cache_dir=",  # a compile for another machine's devices is never read from there
        "log_config=false",
        *([f"compiled_trainstep_file={request.keep}"] if request.keep else []),
    ]
    train_compile.main(["train_compile.py", request.config, *overrides])
    # Only a compile that went through to its end is an answer.
    (folder / f"{_ANSWER}.partial").rename(folder / _ANSWER)


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
