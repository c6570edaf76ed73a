"""The analyser of optimized HLO against a recorded module of the TPU compiler and small texts with known answers."""

import gzip
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT

# llama3-8b with 4 layers for v6e-16, fsdp 4 x tensor 4, batch 1 a device, sequence 4096, full rematerialisation, by
# libtpu 0.0.46; shortened to what the analyser reads.
RECORDED = ROOT / "tests" / "data" / "hlo" / "llama3-8b-4-layers-v6e-16.hlo.gz"
PLACES = [(0, (number // 4, number % 4), 0) for number in range(16)]

PROGRAM = """
import dataclasses, json, sys
from ops import hlo
text, places, wrap = json.load(sys.stdin)
places = [hlo.Place(slice, tuple(coordinates), core) for slice, coordinates, core in places]
print(json.dumps(dataclasses.asdict(hlo.analyze(text, places, tuple(wrap)))))
"""


def told(program: str, *given: Any) -> dict[str, Any]:
    """Run `program` with the template's ops; return what it prints for what it reads, both as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "template",
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def analyze(text: str, places: Any = (), wrap: Any = ()) -> dict[str, Any]:
    return told(PROGRAM, text, places, wrap)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return analyze(gzip.decompress(RECORDED.read_bytes()).decode(), PLACES, (False, False))


def dense_flops(tokens: int, layers: int, emb: int, mlp: int, query: int, key: int, vocabulary: int) -> int:
    """Matmul FLOPs of a step with full rematerialisation: three times forward, and once more what is computed again.

    What only the end of a layer needs (the last projection of the MLP) is not computed again.
    """
    projections = 2 * emb * query + 2 * emb * key + 2 * emb * mlp
    layer = 3 * (projections + mlp * emb) + projections
    return 2 * tokens * (layers * layer + 3 * emb * vocabulary)


def test_matmul_flops_are_the_closed_form_of_the_model_to_the_last_digit(recorded: dict[str, Any]) -> None:
    assert recorded["matmul_flops"] == dense_flops(4096, 4, 4096, 14336, 4096, 1024, 128256)


def test_every_loop_of_the_recorded_step_has_a_trip_count(recorded: dict[str, Any]) -> None:
    assert recorded["unknown_loops"] == []


def test_the_attention_kernels_of_every_layer_are_counted(recorded: dict[str, Any]) -> None:
    counts: dict[str, float] = {}
    for kernel in recorded["kernels"]:
        phase = kernel["name"].split("_")[2]
        counts[phase] = counts.get(phase, 0) + kernel["count"]
        assert kernel["options"]["block_kv" if phase == "fwd" else f"block_kv_{phase}"] == 512
    assert counts == {"fwd": 8, "dkv": 4, "dq": 4}  # the forward kernel runs again in the backward pass


def test_no_instruction_beats_the_matrix_units(recorded: dict[str, Any]) -> None:
    # 524,288 FLOP a cycle is 918 TFLOP/s at 1.75 GHz, and the best fusions come close.
    assert 0.85 * 524288 < recorded["best_flops_per_cycle"] < 524288


def test_collectives_have_kind_synchrony_group_and_axes(recorded: dict[str, Any]) -> None:
    kinds = {(one["kind"], one["mode"], one["group"], one["axes"]) for one in recorded["collectives"]}
    assert {
        ("all-gather", "sync", 4, 1),
        ("reduce-scatter", "sync", 4, 1),
        ("collective-permute", "async", 2, 1),
        ("all-reduce", "sync", 16, 2),
    } <= kinds
    assert not any(one["dcn"] for one in recorded["collectives"])


def test_what_goes_to_another_slice_counts_as_dcn() -> None:
    # The gradient of one 4096 x 4096 matrix on two slices of v6e 2x2: a quarter of it is each device's to exchange.
    text = (RECORDED.parent / "gradient-2-slices-v6e-4.hlo").read_text()
    places = [(slice, (number % 2, number // 2), 0) for slice in range(2) for number in range(4)]
    (over_dcn,) = [one for one in analyze(text, places)["collectives"] if one["dcn"]]
    assert (over_dcn["kind"], over_dcn["group"], over_dcn["count"]) == ("all-reduce", 2, 1)
    assert over_dcn["bytes"] == 4096 * 4096 * 2 / 4
    inside = {(one["kind"], one["group"], one["axes"]) for one in analyze(text, places)["collectives"]}
    assert ("all-gather", 4, 2) in inside


def test_collectives_on_the_sparsecores_do_not_make_the_tensorcore_wait() -> None:
    # Four layers of one 4096 x 4096 matrix over v6e 2x2, each gathered twice and its gradient scattered.
    text = (RECORDED.parent / "layers-on-sparsecore-v6e-4.hlo").read_text()
    totals = analyze(text, [(0, (number % 2, number // 2), 0) for number in range(4)])
    runs: dict[tuple[str, str], float] = {}
    for one in totals["collectives"]:
        runs[one["kind"], one["mode"]] = runs.get((one["kind"], one["mode"]), 0) + one["bytes"] * one["count"]
    matrix = 4096 * 4096 * 2
    assert runs.pop(("reduce-scatter", "sparsecore")) == 4 * matrix * 3 / 4
    assert runs.pop(("all-gather", "sparsecore")) == 8 * matrix * 3 / 4
    assert sum(runs.values()) < 1000  # the loss


LOOP = """HloModule loop, num_partitions=8

%body (p: (s32[], bf16[128,256])) -> (s32[], bf16[128,256]) {{
  %p = (s32[], bf16[128,256]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[128,256]{{1,0}} get-tuple-element(%p), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  %w = bf16[256,256]{{1,0}} constant({{...}})
  %y = bf16[128,256]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %r = bf16[128,256]{{1,0}} all-reduce(%y), replica_groups={groups}, to_apply=%add
  ROOT %t = (s32[], bf16[128,256]{{1,0}}) tuple(%next, %r)
}}

%condition (p: (s32[], bf16[128,256])) -> pred[] {{
  %p = (s32[], bf16[128,256]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant({limit})
  ROOT %c = pred[] compare(%i, %n), direction={direction}
}}

%add (a: bf16[], b: bf16[]) -> bf16[] {{
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %s = bf16[] add(%a, %b)
}}

ENTRY %main (x: bf16[128,256]) -> bf16[128,256] {{
  %x = bf16[128,256]{{1,0}} parameter(0)
  %zero = s32[] constant({start})
  %t = (s32[], bf16[128,256]{{1,0}}) tuple(%zero, %x)
  %loop = (s32[], bf16[128,256]{{1,0}}) while(%t), condition=%condition, body=%body{said}
  ROOT %out = bf16[128,256]{{1,0}} get-tuple-element(%loop), index=1
}}
"""
BODY_FLOPS = 2 * 128 * 256 * 256


def loop(**changes: Any) -> str:
    values = {"start": 0, "step": 1, "limit": 5, "direction": "LT", "said": "", "groups": "{{0,1,2,3},{4,5,6,7}}"}
    return LOOP.format(**values | changes)


@pytest.mark.parametrize(
    ("changes", "trips"),
    [
        ({}, 5),
        ({"step": 2, "limit": 16}, 8),  # collective matmuls step by two
        ({"start": 7, "step": -1, "limit": 0, "direction": "GE"}, 8),
        ({"direction": "NE"}, 5),
        ({"limit": 0}, 0),
        ({"limit": 99, "said": ', backend_config={"known_trip_count":{"n":"3"}}'}, 3),
    ],
)
def test_a_loop_body_counts_as_often_as_it_runs(changes: dict[str, Any], trips: int) -> None:
    totals = analyze(loop(**changes))
    assert totals["matmul_flops"] == trips * BODY_FLOPS
    assert sum(one["count"] for one in totals["collectives"]) == trips


def test_a_loop_that_never_ends_is_reported_not_guessed() -> None:
    totals = analyze(loop(step=0))
    assert totals["unknown_loops"] == ["loop"]
    assert totals["matmul_flops"] == BODY_FLOPS


@pytest.mark.parametrize(
    ("groups", "size", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4, 1),
        ("[2,4]<=[8]", 4, 1),
        ("[4,2]<=[2,4]T(1,0)", 2, 1),
        ("mesh['a'=2,'b'=4] {'b'}", 4, 1),
        ("mesh['a'=2,'b'=4] {'a','b'}", 8, 2),
        ("mesh['a'=8] {'a':(1)2}", 2, 1),
        ("{}", 8, 2),
    ],
)
def test_all_ways_to_write_groups_are_read(groups: str, size: int, axes: int) -> None:
    places = [(0, (number // 4, number % 4), 0) for number in range(8)]
    (one,) = analyze(loop(limit=1, groups=groups), places)["collectives"]
    assert (one["group"], one["axes"]) == (size, axes)
    assert one["bytes"] == 2 * (128 * 256 * 2) * (size - 1) / size
    (wrapped,) = analyze(loop(limit=1, groups=groups), places, (True, True))["collectives"]
    assert wrapped["axes"] == 2 * axes


CONVOLUTION = """HloModule c

ENTRY %main (a: bf16[{left}], b: bf16[{right}]) -> bf16[{out}] {{
  %a = bf16[{left}] parameter(0)
  %b = bf16[{right}] parameter(1)
  ROOT %c = bf16[{out}] convolution(%a, %b), {attributes}
}}
"""


@pytest.mark.parametrize(
    ("left", "right", "out", "attributes", "flops"),
    [
        ("64,32", "32,16", "64,16", "dim_labels=bf_io->bf", 2 * 64 * 32 * 16),
        # A windowed einsum: two halves of the kernel, each of which meets one real input.
        ("32,64,1", "32,2,16", "64,2,16", "window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=fb0_i0o->b0f", 65536 * 2),
        # A batch of 8 products, written as one spatial dimension.
        (
            "8,64,32",
            "8,32,16",
            "8,64,16",
            "window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
            8 * 65536,
        ),
    ],
)
def test_a_convolution_counts_only_what_meets_real_input(
    left: str, right: str, out: str, attributes: str, flops: int
) -> None:
    text = CONVOLUTION.format(left=left, right=right, out=out, attributes=attributes)
    assert analyze(text)["matmul_flops"] == flops


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        analyze("nothing")
    assert "this is no HLO module" in caught.value.stderr
