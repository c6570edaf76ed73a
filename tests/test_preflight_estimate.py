"""The estimate from a compiled step: closed forms where there are some, and what it says about its own doubts."""

import gzip
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from extensions import questionnaire as extension
from tests.conftest import ROOT
from tests.test_preflight_hlo import PLACES, RECORDED, told

PROGRAM = """
import dataclasses, json, sys
from types import SimpleNamespace
from ops import compile_step, estimate, hlo
text, places, shape, changes = json.load(sys.stdin)
places = [hlo.Place(slice, tuple(coordinates), core) for slice, coordinates, core in places]
totals = dataclasses.replace(hlo.analyze(text, places, (False, False)), **changes)
memory = compile_step.Memory(0, 0, 0, 0, 0, 0)
result = compile_step.Result(memory, totals, 4096, 30.0, 0, {}, 16, {}, 0, 0, 0)
again = compile_step.from_json(json.loads(json.dumps(compile_step.to_json(result))))
assert again == result
print(json.dumps(dataclasses.asdict(estimate.estimate(result, estimate.Hardware.of(SimpleNamespace(**shape))))))
"""


def recorded(layers: int) -> str:
    """The recorded step with its loops over 4 layers running over `layers`; what follows the loops stays that of 4."""
    text = gzip.decompress(RECORDED.read_bytes()).decode()
    conditions = set(re.findall(r"condition=%([\w.\-]+)", text))
    lines, name = [], ""
    for line in text.splitlines():
        if head := re.match(r"%([\w.\-]+) \(.*\{$", line):
            name = head[1]
        lines.append(line.replace("constant(4)", f"constant({layers})") if name in conditions else line)
    return "\n".join(lines)


def estimate(generation: str = "v6e", layers: int = 4, **changes: Any) -> dict[str, Any]:
    shape = extension.facts.slice_of(generation, "4x4" if generation == "v6e" else "2x2x2")
    return told(PROGRAM, recorded(layers), PLACES, shape._asdict(), changes)


def test_attention_executes_the_blocks_that_touch_the_causal_triangle() -> None:
    # 36 of 64 blocks of 512 in a sequence of 4096: 1.125 times the triangle. The forward kernel runs twice, the two
    # backward kernels take 3.5 times as much, and there are 4 layers of 4096 = heads x dimension.
    triangle = 2 * 4096**2 * 4096
    found = estimate()
    assert found["kernel_tflop"] * 1e12 == pytest.approx(1.125 * triangle * (2 + 3.5) * 4)
    # 240 TFLOP/s for blocks of 512, fitted to a published step.
    assert found["attention"] == pytest.approx(found["kernel_tflop"] / 240, rel=0.001)


def test_the_tutorials_step_comes_out_as_google_measured_it() -> None:
    # Llama 3 8B, fsdp 4 x tensor 4, batch 1, v6e-16: 1.100 s published. The optimizer of 28 layers is not in it (2 %).
    found = estimate(layers=32)
    assert found["matmul_tflop"] * 1e12 == pytest.approx(226_215_927_480_320, rel=1e-12)
    assert found["attention"] == pytest.approx(0.113, abs=0.001)
    assert found["ici_gb"] == pytest.approx(32.7 + 20.0, abs=0.1)
    assert found["step"] == pytest.approx(1.100, rel=0.03)


def test_the_step_adds_up_and_is_no_shorter_than_its_arithmetic() -> None:
    found = estimate()
    assert found["step"] == pytest.approx(found["tensorcore"] + found["attention"] + found["waits"])
    assert found["compute_bound"] == pytest.approx((found["matmul_tflop"] + found["kernel_tflop"]) / 918)
    assert found["step"] > found["compute_bound"]
    assert found["tokens_per_second"] == pytest.approx(4096 / found["step"])
    assert found["mfu"] == pytest.approx(30.0 / found["step"] / 918)
    assert found["binds"] == "ICI"
    assert found["unsure"] == []


def test_collectives_over_one_unwrapped_axis_go_at_the_speed_of_one_link() -> None:
    gathered = {"kind": "all-gather", "mode": "sync", "bytes": 90e9, "group": 4, "count": 2, "axes": 1, "dcn": False}
    program = "from ops import estimate, hlo; import json, sys\nh, c = json.load(sys.stdin)\n"
    program += "print(estimate._collective_seconds(hlo.Collective(**c), estimate.Hardware(**h)))"
    hardware = ["v6e", 918, 31.24, 1638, 90, 12.5, 1.75, 1]
    fields = "generation peak_tflops hbm_gib hbm_gbps ici_link_gbps dcn_gbps_per_chip clock_ghz devices_per_chip"
    names = fields.split()

    def seconds(**changes: Any) -> float:
        values = [dict(zip(names, hardware, strict=True)), gathered | changes]
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT / "template",
            input=json.dumps(values),
            capture_output=True,
            text=True,
            check=True,
        )
        return float(done.stdout)

    assert seconds() == pytest.approx(1)
    assert seconds(axes=2) == pytest.approx(0.5)
    assert seconds(kind="collective-permute", axes=2) == pytest.approx(1)
    assert seconds(dcn=True, bytes=12.5e9, axes=0) == pytest.approx(1)


def test_doubts_are_told() -> None:
    assert estimate(unknown_loops=["a/while"])["unsure"] == [
        "the trip count of loop a/while is not known: counted once"
    ]
    (clock,) = estimate(best_flops_per_cycle=600_000)["unsure"]
    assert "the compiler counts cycles of another clock" in clock
    assert any("fitted to v6e only" in text for text in estimate("v5p")["unsure"])
