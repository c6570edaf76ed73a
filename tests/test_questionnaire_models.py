"""The models offered against the installed MaxText, and every rendered config/train.yml loaded by it."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.conftest import read_env


@pytest.fixture(scope="module")
def maxtext(run_python: Path) -> Path:
    """Folder of the installed MaxText package."""
    code = "import importlib.util as u; print(u.find_spec('maxtext').submodule_search_locations[0])"
    return Path(subprocess.run([run_python, "-c", code], check=True, capture_output=True, text=True).stdout.strip())


def model_files(maxtext: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: yaml.safe_load(path.read_text()) for path in (maxtext / "configs" / "models").glob("*.yml")}


def test_every_model_of_maxtext_is_offered_or_left_out_with_a_reason(questionnaire: ModuleType, maxtext: Path) -> None:
    facts = questionnaire.facts
    assert not facts.MODELS.keys() & facts.MODELS_LEFT_OUT.keys()
    assert facts.MODELS.keys() | facts.MODELS_LEFT_OUT.keys() == model_files(maxtext).keys()
    assert all(facts.MODELS_LEFT_OUT.values())


def test_kind_vocabulary_and_experts_are_those_of_maxtext(questionnaire: ModuleType, maxtext: Path) -> None:
    files = model_files(maxtext)
    for name, record in questionnaire.facts.MODELS.items():
        settings = files[name]
        experts = settings.get("num_experts", 1)
        kind = "mla" if settings.get("attention_type") == "mla" else "moe" if experts > 1 else "dense"
        assert (record["kind"], record["vocab_size"]) == (kind, settings["vocab_size"]), name
        assert record.get("experts", 1) == experts, name
        if kind != "dense":
            seen = (settings["num_experts_per_tok"], settings["base_moe_mlp_dim"])
            assert (record["experts_per_token"], record["expert_mlp_dim"]) == seen, name
        mla = kind == "mla"
        head = settings["v_head_dim"] if mla else settings.get("head_dim", 128)
        dimensions = (settings["base_num_decoder_layers"], settings["base_emb_dim"], settings["base_num_query_heads"])
        assert (record["layers"], record["emb_dim"], record["attention_dim"] // head) == dimensions, name


def test_models_that_share_plans_are_the_same_to_the_compiler(questionnaire: ModuleType, maxtext: Path) -> None:
    files = model_files(maxtext)
    for name, record in questionnaire.facts.MODELS.items():
        if other := record.get("plans_of"):
            assert files[name] == files[other], name


def test_every_tokenizer_is_in_the_wheel_or_is_a_hugging_face_id(questionnaire: ModuleType, maxtext: Path) -> None:
    carried = {path.name for path in (maxtext / "assets" / "tokenizers").iterdir()}
    used = set()
    for name, record in questionnaire.facts.MODELS.items():
        assert record["tokenizer"].count("/") == 1, name
        if asset := record.get("asset"):
            assert asset in carried, name
            used.add(asset)
    # tokenizer.default is the old T5 vocabulary of MaxText's own unnamed model.
    assert carried - used <= {"tokenizer.default"}


def test_hugging_face_ids_are_those_that_maxtext_names(questionnaire: ModuleType, run_python: Path) -> None:
    code = "import json; from maxtext.utils.globals import HF_IDS; print(json.dumps(HF_IDS))"
    done = subprocess.run([run_python, "-c", code], check=True, capture_output=True, text=True)
    named = json.loads(done.stdout.splitlines()[-1])
    differ = {
        name: (record["tokenizer"], named[name])
        for name, record in questionnaire.facts.MODELS.items()
        if name in named and named[name] != record["tokenizer"]
    }
    # Qwen3-30B-A3B: the base model's tokenizer, without the chat template of the thinking one.
    assert differ.keys() <= {"qwen3-30b-a3b"}


LOAD = """
import json, os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
from maxtext.configs import pyconfig
answers = []
for path, target, slices in json.load(sys.stdin):
    config = pyconfig.initialize(
        ["", path, "hardware=cpu", "jax_cache_dir=", "log_config=false",
         f"compile_topology={target}", f"compile_topology_num_slices={slices}"]
    )
    names = ["model_name", "run_name", "checkpoint_dir", "checkpoint_period", "max_num_checkpoints_to_keep", "steps",
             "max_target_length", "per_device_batch_size", "num_target_devices", "global_batch_size_to_train_on",
             "ici_parallelism", "dcn_parallelism", "tokenizer_path", "dataset_type", "vocab_size"]
    answers.append({name: getattr(config, name) for name in names})
print(json.dumps(answers, default=str))
"""

JOBS: list[dict[str, Any]] = [
    {},
    {"generation": "v5p", "num_slices": 2, "dcn_parallelism": "fsdp=2"},
    {"generation": "tpu7x", "model": "gpt-oss-120b", "topology": "4x4x4", "ici_parallelism": "fsdp=64,expert=2"},
    {"generation": "v5e", "topology": "2x4", "model": "qwen3-0.6b", "ici_parallelism": "data=2,fsdp=2,tensor=2"},
    {"ici_parallelism": "fsdp=8,tensor=2", "per_device_batch_size": "0.5", "sequence_length": "8192"},
    {"topology": "4x8", "model": "mixtral-8x7b", "ici_parallelism": "fsdp=-1,expert=8"},
    {"model": "gemma3-4b", "dataset_type": "hf", "dataset_path": "allenai/c4/en"},
    {"dataset_type": "hf", "dataset_path": "gs://my-bucket/c4/*.parquet", "tokenizer": "NousResearch/Llama-3"},
    {"dataset_type": "grain", "dataset_path": "/data/c4/*.parquet"},
    {"dataset_type": "grain", "dataset_path": "gs://b-1/a/*.array_record*", "dataset_format": "arrayrecord"},
]


@pytest.fixture(scope="module")
def by_model(
    tmp_path_factory: pytest.TempPathFactory, questionnaire: ModuleType, in_process: Callable[..., Path]
) -> dict[str, Path]:
    """A rendered project for every model, on the first slice of these generations that it fits."""
    folder = tmp_path_factory.mktemp("models")
    facts = questionnaire.facts
    projects = {}
    for name in facts.MODELS:
        sizes = {generation: facts.smallest_topology(name, generation) for generation in ("v6e", "v5p")}
        generation = next(generation for generation, size in sizes.items() if size)
        answers = {"generation": generation, "topology": sizes[generation], "model": name}
        projects[name] = in_process(folder / name, **answers)
    return projects


@pytest.mark.slow
def test_maxtext_loads_the_config_of_every_model_and_kind_of_job(
    by_model: dict[str, Path],
    tmp_path: Path,
    questionnaire: ModuleType,
    run_python: Path,
    maxtext: Path,
    in_process: Callable[..., Path],
) -> None:
    facts = questionnaire.facts
    projects = [(job, in_process(tmp_path / str(index), **job)) for index, job in enumerate(JOBS)]
    projects += [({"model": name}, project) for name, project in by_model.items()]
    question, environments = [], []
    for _, project in projects:
        env = read_env(project / "run.env")
        environments.append(env)
        question.append([str(project / "config/train.yml"), env["COMPILE_TOPOLOGY"], env["NUM_SLICES"]])
    done = subprocess.run(
        [run_python, "-c", LOAD],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=600,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "MAXTEXT_ASSETS_ROOT": str(maxtext / "assets"),
            # Reads only the shape of the slice from libtpu, beside whatever else compiles on this machine.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_SKIP_MDS_QUERY": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for (job, _), env, config in zip(projects, environments, json.loads(done.stdout.splitlines()[-1]), strict=True):
        devices = int(env["DEVICES_PER_SLICE"]) * int(env["NUM_SLICES"])
        assert config["num_target_devices"] == devices, job
        assert config["model_name"] == env["MODEL"], job
        assert config["run_name"] == env["RUN_NAME"], job
        assert config["checkpoint_dir"].startswith(f"gs://{env['BUCKET']}/"), job
        assert (config["steps"], config["checkpoint_period"]) == (int(env["STEPS"]), 20), job
        assert config["max_num_checkpoints_to_keep"] == 3, job
        assert config["global_batch_size_to_train_on"] == float(config["per_device_batch_size"]) * devices, job
        for sizes, total in (
            (config["ici_parallelism"], int(env["DEVICES_PER_SLICE"])),
            (config["dcn_parallelism"], int(env["NUM_SLICES"])),
        ):
            known = 1
            for size in sizes:
                known *= abs(size)
            assert total % known == 0 if -1 in sizes else known == total, (job, sizes)
        assert config["vocab_size"] == facts.MODELS[env["MODEL"]]["vocab_size"], job
        asset = facts.MODELS[env["MODEL"]].get("asset")
        if asset and job.get("dataset_type") != "hf":
            assert Path(config["tokenizer_path"]).exists(), (job, config["tokenizer_path"])


def test_no_model_file_of_maxtext_overrides_the_runs_own_config(by_model: dict[str, Path], maxtext: Path) -> None:
    """MaxText merges base.yml, config/train.yml, then the model's file: what stands in both would be lost."""
    files = model_files(maxtext)
    for name, project in by_model.items():
        train = yaml.safe_load((project / "config/train.yml").read_text())
        lost = {key for key in train.keys() & files[name].keys() if train[key] != files[name][key]}
        assert not lost, (name, lost)
