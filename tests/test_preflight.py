"""`make preflight` with the real TPU compiler: real compiles of a small model for v6e, and every refusal."""

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from extensions import questionnaire as extension
from tests.conftest import Render
from tests.test_preflight_hlo import dense_flops

TIMEOUT_SECONDS = 900
# A dense model of two layers, as small as the kernels allow, on one host.
TOKENS, LAYERS, EMB, MLP, QUERY, KEY, VOCABULARY = 1024, 2, 512, 1024, 512, 256, 2048
SMALL = [
    "override_model_config=true",
    f"base_num_decoder_layers={LAYERS}",
    f"base_emb_dim={EMB}",
    f"base_mlp_dim={MLP}",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=128",
    f"vocab_size={VOCABULARY}",
    f"max_target_length={TOKENS}",
]


def preflight(
    folder: Path, run_python: Path, *arguments: str, **environment: str
) -> tuple[int, str, dict[str, Any], float]:
    """Preflight in a rendered repository; return exit code, what was printed, the report (empty if none), seconds."""
    report = folder / "build" / "preflight" / "report.json"
    report.unlink(missing_ok=True)
    began = time.monotonic()
    done = subprocess.run(
        [run_python, "-m", "ops.preflight", *arguments],
        cwd=folder,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    values = json.loads(report.read_text()) if report.exists() else {}
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout, values, time.monotonic() - began


def call(folder: Path, run_python: Path, code: str) -> str:
    """Run `code` with the rendered repository's ops in its Python and return what it prints."""
    done = subprocess.run([run_python, "-c", code], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory, template_files: Path, run_python: Path
) -> tuple[Path, str, dict[str, Any]]:
    """A repository in which the small model was compiled for v6e 2x2 and kept: its folder, the output, the report."""
    from copier import run_copy

    folder = tmp_path_factory.mktemp("preflight") / "run"
    answers = {"topology": "2x2"}
    run_copy(str(template_files), folder, data=answers, defaults=True, quiet=True, unsafe=True)
    code, printed, report, _ = preflight(folder, run_python, *SMALL, "--keep")
    assert code == 0, printed
    return folder, printed, report


def test_a_step_that_fits_is_told_with_its_speed_and_price(compiled: tuple[Path, str, dict[str, Any]]) -> None:
    folder, printed, report = compiled
    assert "nothing here is measured" in printed
    assert re.search(r"HBM +\d+\.\d\d of 31\.24 GiB a device", printed)
    assert re.search(r"lower bounds +compute \d+ ms, HBM \d+ ms, ICI \d+ ms, DCN 0 ms: \w+ binds", printed)
    assert re.search(r"1e9 tokens +[\d.]+ h, about [\d.,]+ USD", printed)
    assert "It fits (compiled in " in printed
    memory = report["memory"]
    assert memory["arguments"] + memory["temporaries"] + memory["code"] == memory["total"]
    assert report["devices"] == 4
    assert report["tokens"] == TOKENS
    picture = folder / "build" / "preflight" / "report.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_matmul_flops_of_a_compiled_step_are_the_closed_form(compiled: tuple[Path, str, dict[str, Any]]) -> None:
    _, _, report = compiled
    expected = dense_flops(TOKENS, LAYERS, EMB, MLP, QUERY, KEY, VOCABULARY)
    assert report["totals"]["matmul_flops"] == expected
    # And MaxText's own count of the model: three times forward, and causal attention.
    layer = 2 * EMB * QUERY + 2 * EMB * KEY + 3 * EMB * MLP
    attention = 3 * 2 * TOKENS**2 * QUERY * LAYERS
    model = 3 * 2 * TOKENS * (LAYERS * layer + EMB * VOCABULARY) + attention
    assert report["model_tflops"] == pytest.approx(model / 1e12, rel=1e-6)


def test_the_step_is_at_least_as_long_as_every_lower_bound_but_traffic(
    compiled: tuple[Path, str, dict[str, Any]],
) -> None:
    figures = compiled[2]["figures"]
    assert figures["step"] >= figures["compute_bound"]
    assert figures["step"] == pytest.approx(figures["tensorcore"] + figures["attention"] + figures["waits"])
    assert 0 < figures["mfu"] < 1
    assert figures["unsure"] == []


def test_an_unchanged_run_answers_within_two_seconds(
    compiled: tuple[Path, str, dict[str, Any]], run_python: Path
) -> None:
    folder, _, report = compiled
    seconds = []
    for _ in range(3):  # on a busy machine one of them may wait for a core
        code, printed, again, took = preflight(folder, run_python, *SMALL, "--keep")
        assert code == 0
        assert "from the cache" in printed
        assert again == report
        seconds.append(took)
    assert min(seconds) < 2


@pytest.mark.parametrize("change", ["override", "config", "flags"])
def test_a_change_is_never_answered_from_the_cache(
    change: str, compiled: tuple[Path, str, dict[str, Any]], run_python: Path
) -> None:
    folder = compiled[0]
    code = (
        "from ops import libtpu, preflight; import pathlib, dataclasses; from ops.compile_step import Request\n"
        "request = Request('config/train.yml', ('steps=5',), ('--a=1',), 'v6e-4')\n"
        "before = preflight.cache_key(request, 'v6e')\n"
        "changed = {'override': {'overrides': ('steps=6',)}, 'flags': {'flags': ('--a=2',)}, 'config': {}}\n"
        f"request = dataclasses.replace(request, **changed['{change}'])\n"
        "config = pathlib.Path('config/train.yml'); text = config.read_text()\n"
        f"if '{change}' == 'config': config.write_text(text + '# more\\n')\n"
        "print(before == preflight.cache_key(request, 'v6e'))\n"
        "config.write_text(text)\n"
    )
    assert call(folder, run_python, code) == "False"


KEPT = """
import json, pathlib
from ops import libtpu
config = pathlib.Path("config/train.yml").read_text()
name = libtpu.fingerprint(config, {overrides}, libtpu.read_flags(), "v6e-4", 1)
note = libtpu.KEPT_STEP.with_suffix(".json")
text = note.read_text()
note.write_text(text.replace(libtpu.versions()["libtpu"], "{version}"))
print(json.dumps(libtpu.kept_step(name)))
note.write_text(text)
"""


@pytest.mark.parametrize(
    ("overrides", "version", "reason"),
    [
        (SMALL, "", ""),
        (SMALL, "0.0.1", "libtpu 0.0.1 then, "),
        ([*SMALL, "steps=7"], "", "configuration, flags or slices have changed"),
    ],
)
def test_a_kept_step_is_used_for_the_same_run_and_versions_only(
    overrides: list[str], version: str, reason: str, compiled: tuple[Path, str, dict[str, Any]], run_python: Path
) -> None:
    folder = compiled[0]
    installed = call(folder, run_python, "from ops import libtpu; print(libtpu.versions()['libtpu'])")
    program = KEPT.format(overrides=overrides, version=version or installed)
    path, why = json.loads(call(folder, run_python, program))
    assert bool(path) == (not reason)
    assert reason in why
    assert bool(why) == bool(reason)


def test_a_step_that_does_not_fit_ends_with_what_is_missing(
    compiled: tuple[Path, str, dict[str, Any]], run_python: Path
) -> None:
    code, printed, report, _ = preflight(
        compiled[0], run_python, *SMALL, "per_device_batch_size=16384", "remat_policy=minimal", "--no-search"
    )
    assert code == 1, printed
    assert re.search(
        r"error: it does not fit: .* GiB of HBM a device, and a device has 31\.24: [\d.]+ GiB are", printed
    )
    assert report["kind"] == "hbm"
    assert report["needed_gib"] > report["limit_gib"] == 31.24


@pytest.mark.sweep
def test_changes_that_fit_are_found_by_compiling_them(
    compiled: tuple[Path, str, dict[str, Any]], run_python: Path
) -> None:
    code, printed, report, _ = preflight(compiled[0], run_python, *SMALL, "per_device_batch_size=2048")
    assert code == 1, printed
    assert report["changes"], printed
    for command in report["changes"]:
        assert re.search(rf"fits in [\d.]+ GiB, [\d,]+ tokens/s/device:  {re.escape(command)}", printed)
    given = re.search(r'make preflight ARGS="([^"]*)"', report["changes"][0])
    assert given
    code, printed, _, _ = preflight(compiled[0], run_python, *given[1].split())
    assert code == 0, printed


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (
            ["per_device_batchsize=1"],
            {},
            "'per_device_batchsize' is no key of MaxText; did you mean per_device_batch_size?",
        ),
        (
            ["ici_fsdp_parallelism=3"],
            {},
            "the mesh does not match the slice: Number of devices per slice 4 does not match the product of the ICI "
            "parallelism 3. run.env has 4 devices a slice (ici_*_parallelism) and 1 slice(s)",
        ),
        (
            [],
            {"XLA_FLAGS": "--xla_tpu_scoped_vmem_limit_kib=98304"},
            "XLA_FLAGS holds --xla_tpu_scoped_vmem_limit_kib=98304, which only libtpu knows",
        ),
        (["steps"], {}, "'steps' is no override: give key=value"),
        (["nowhere.yml"], {}, "there is no config nowhere.yml"),
        (["eval_interval=5", "--keep"], {}, "MaxText runs a kept step without evaluation"),
    ],
    ids=["key", "mesh", "XLA_FLAGS", "override", "config", "evaluation"],
)
def test_what_cannot_work_is_refused_in_one_clear_message(
    arguments: list[str], environment: dict[str, str], message: str, render: Render, run_python: Path
) -> None:
    code, printed, report, _ = preflight(render(topology="2x2"), run_python, *arguments, **environment)
    assert code in (1, 2)
    assert message in printed
    assert printed.count("error: ") == 1
    assert not report


BAD_FLAGS = "--xla_tpu_no_such_flag=true\n--xla_tpu_enable_async_collective_fusion=BOGUS\n"


@pytest.mark.parametrize("program", [["-m", "ops.preflight"], ["train.py"]], ids=["preflight", "train"])
def test_flags_that_this_libtpu_refuses_end_preflight_and_trainer_at_once(
    program: list[str], render: Render, run_python: Path
) -> None:
    folder = render()
    (folder / "config" / "libtpu.flags").write_text(BAD_FLAGS)
    done = subprocess.run(
        [run_python, *program], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert done.returncode == 1
    assert re.search(
        r"error: libtpu [\d.]+ refuses the flags of config/libtpu.flags: it does not know ", done.stdout + done.stderr
    )
    assert "--xla_tpu_no_such_flag" in done.stdout + done.stderr


def test_async_collective_fusion_is_refused_where_this_libtpu_refuses_it(run_python: Path, render: Render) -> None:
    log = (
        "jax.errors.JaxRuntimeError: FAILED_PRECONDITION: Continuation fusion for AllGather is enabled on platform "
        "ghostlite (variant: ), but it is not supported/recommended on platforms other than TPU v5e\n"
    )
    program = f"from ops import libtpu; print(libtpu.refused_flags({log!r}))"
    message = call(render(), run_python, program)
    assert "no longer compiles async collective fusion of AllGather for this generation" in message
    assert "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=false" in message


def test_another_platform_is_told_how_to_run_it_in_a_container(render: Render, run_python: Path) -> None:
    code = (
        "import platform; from ops import libtpu\n"
        "libtpu.versions = dict\n"
        "platform.system, platform.machine = lambda: 'Darwin', lambda: 'arm64'\n"
        "print(libtpu.missing())"
    )
    message = call(render(), run_python, code)
    assert message.startswith("the TPU compiler (libtpu) exists for Linux x86_64 only, and this is Darwin arm64")
    assert "docker run --rm -it --platform linux/amd64" in message


def test_a_machine_with_too_little_memory_is_told_so_and_nothing_is_left_running(
    render: Render, run_python: Path
) -> None:
    code = (
        "from pathlib import Path; from ops import compile_step\n"
        "compile_step.MEMORY_RESERVE_GIB = 1e6\n"
        "request = compile_step.Request('config/train.yml', (), (), 'v6e-4')\n"
        "print(compile_step.compile(request, Path('build/x')))"
    )
    folder = render(topology="2x2")
    printed = call(folder, run_python, code)
    assert "kind='host memory'" in printed
    assert "too little memory for the compile" in printed
    listed = subprocess.run(["ps", "-eo", "args"], check=True, capture_output=True, text=True).stdout
    assert str(folder) not in listed


def test_larger_slices_are_those_of_the_generation(render: Render, run_python: Path) -> None:
    code = "from ops import preflight, run_env; print(preflight.larger_slices(run_env.load()))"
    assert call(render(), run_python, code) == "[('v6e-32', '4x8'), ('v6e-64', '8x8'), ('v6e-128', '8x16')]"
    assert call(render(generation="tpu7x", topology="2x2x1"), run_python, code).startswith("[('tpu7x-16', '2x2x2'), ")


def test_the_flag_check_asks_for_the_smallest_slices_as_maxtext_names_them(render: Render, run_python: Path) -> None:
    code = (
        "import re; from ops import libtpu; from ops.small_model import maxtext_folder\n"
        "table = (maxtext_folder() / 'utils' / 'accelerator_to_spec_map.py').read_text()\n"
        "for name, bounds, chip in libtpu._SMALLEST.values():\n"
        '    row = rf\'"{re.escape(name)}", "{chip}", \\({bounds.replace(chr(120), ", ")}\\),\'\n'
        "    assert re.search(row, table), row\n"
        "print(*libtpu._SMALLEST)"
    )
    assert call(render(), run_python, code).split() == list(extension.facts.GENERATIONS)


def test_changes_are_tried_closest_to_the_run_first(render: Render, run_python: Path) -> None:
    code = (
        "from ops import preflight; from ops.compile_step import Failure\n"
        "settings = {'per_device_batch_size': 6, 'max_target_length': 4096, 'remat_policy': 'custom'}\n"
        "for kind in preflight.candidates(settings, Failure('hbm', '', 40.0, 31.24)): print(kind)"
    )
    assert call(render(), run_python, code).splitlines() == [
        "[['per_device_batch_size=4'], ['per_device_batch_size=3'], ['per_device_batch_size=1']]",
        "[['remat_policy=full'], ['remat_policy=custom', 'decoder_layer_input=offload']]",
        "[['max_target_length=2048'], ['max_target_length=1024'], ['max_target_length=512']]",
    ]
