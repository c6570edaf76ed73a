"""Renders variants and reads the numbers and names back out of every emitted file."""

import filecmp
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from allpairspy import AllPairs

from extensions import questionnaire as extension
from tests.conftest import ROOT, Render, read_env

facts = extension.facts
CHECKED = yaml.safe_load((ROOT / "tests/data/slices.yml").read_text())["slices"]
CONFIG = yaml.safe_load((ROOT / "copier.yml").read_text(encoding="utf-8"))
DATASETS = {
    "synthetic": ("", "parquet"),
    "hf": ("allenai/c4/en", "parquet"),
    "grain parquet": ("gs://my-data/c4/*.parquet", "parquet"),
    "grain arrayrecord": ("/data/c4/*.array_record", "arrayrecord"),
}


def slices_for(generation: str, hosts: str, model: str) -> list[str]:
    """Topologies of one or several hosts on which a model fits."""
    return [
        name
        for name in facts.topologies(generation)
        if facts.slice_of(generation, name).multi_host == (hosts == "several")
        and facts.can_fit(model, generation, name)
    ]


def possible(row: list[Any]) -> bool:
    """Combinations that the questionnaire refuses are tested in test_rules.py."""
    named = dict(zip(("generation", "hosts", "slices", "capacity", "mode", "model"), row, strict=False))
    if named.get("slices", 1) > 1 and named["hosts"] == "one":
        return False
    if "model" in named and not slices_for(named["generation"], named["hosts"], named["model"]):
        return False
    return named.get("capacity", "spot") in facts.capacities(named["generation"])


def matrix() -> Iterator[dict[str, Any]]:
    """Every pair of choices of generation, single or multi host, slices, capacity, cluster mode,
    model and dataset, with the topologies of a generation taken in turn; then the topologies that
    were not reached.
    """
    turns = itertools.count()
    pairs = AllPairs(
        [
            list(facts.GENERATIONS),
            ["one", "several"],
            [1, 2, 3],
            facts.capacities("v6e"),
            CONFIG["cluster_mode"]["choices"],
            list(facts.MODELS),
            list(DATASETS),
        ],
        filter_func=possible,
    )
    # Where a filter stands in its way, the library leaves pairs out.
    left = {(name, topology) for name in facts.GENERATIONS for topology in facts.topologies(name)}
    of_model: dict[str, dict[str, set[Any]]] = {
        name: {
            "generation": {generation for generation in facts.GENERATIONS if facts.smallest_topology(name, generation)},
            "capacity": set(facts.capacities("v6e")),
            "mode": set(CONFIG["cluster_mode"]["choices"]),
            "dataset": set(DATASETS),
        }
        for name in facts.MODELS
    }

    def job(generation: str, topology: str, slices: int, capacity: str, mode: str, model: str, dataset: str) -> Any:
        left.discard((generation, topology))
        for name, value in (("generation", generation), ("capacity", capacity), ("mode", mode), ("dataset", dataset)):
            of_model[model][name].discard(value)
        path, form = DATASETS[dataset]
        return {
            "generation": generation,
            "topology": topology,
            "num_slices": slices,
            "capacity": capacity,
            "reservation": "my-reservation" if capacity == "reservation" else "",
            "cluster_mode": mode,
            "model": model,
            "dataset_type": dataset.split()[0],
            "dataset_path": path,
            "dataset_format": form,
        }

    for generation, hosts, slices, capacity, mode, model, dataset in pairs:
        topologies = slices_for(generation, hosts, model)
        yield job(generation, topologies[next(turns) % len(topologies)], slices, capacity, mode, model, dataset)
    for model, missing in of_model.items():
        while any(missing.values()):
            capacity = min(missing["capacity"], default="on-demand")
            fits = [
                name
                for name in facts.GENERATIONS
                if facts.smallest_topology(model, name) and capacity in facts.capacities(name)
            ]
            generation = min(missing["generation"] & set(fits), default=None)
            if generation is None and not missing["capacity"]:
                generation = min(missing["generation"], default=None)
            generation = generation or fits[0]
            mode, dataset = min(missing["mode"], default="standard"), min(missing["dataset"], default="synthetic")
            topology = facts.smallest_topology(model, generation)
            yield job(generation, topology, 1, capacity, mode, model, dataset)
    for generation, topology in sorted(left):
        yield {"generation": generation, "topology": topology}


JOBS = list(matrix())


def assert_agrees(project: Path, job: dict[str, Any]) -> None:
    """run.env and config/ say what the answers and the checked table say, and agree with each other."""
    env = read_env(project / "run.env")
    train = yaml.safe_load((project / "config/train.yml").read_text())
    row = CHECKED[f"{env['GENERATION']} {env['TOPOLOGY']}"]
    assert [
        env["MACHINE_TYPE"],
        int(env["HOSTS_PER_SLICE"]),
        int(env["CHIPS_PER_HOST"]),
        int(env["CHIPS_PER_SLICE"]),
        int(env["DEVICES_PER_HOST"]),
        int(env["DEVICES_PER_SLICE"]),
        env["GKE_TPU_ENV"],
        env["RAY_POD_TYPE"],
        env["COMPILE_TOPOLOGY"],
    ] == row
    for name, value in job.items():
        if name.upper() in env:
            assert env[name.upper()] == str(value), name
    assert int(env["CHIPS_PER_SLICE"]) == math.prod(map(int, env["TOPOLOGY"].split("x")))
    assert int(env["HOSTS_PER_SLICE"]) * int(env["DEVICES_PER_HOST"]) == int(env["DEVICES_PER_SLICE"])
    assert env["CLUSTER_LOCATION"] == (env["ZONE"] if env["CLUSTER_MODE"] == "standard" else env["REGION"])
    assert env["IMAGE_REPOSITORY"].startswith(f"{env['REGION']}-docker.pkg.dev/")
    assert float(env["HBM_GIB_PER_DEVICE"]) > 0
    assert float(env["PEAK_TFLOPS_PER_DEVICE"]) > 0
    assert bool(env["PRICE_PER_CHIP_HOUR"]) == bool(env["PRICE_DATE"])
    if env["CAPACITY"] in ("spot", "reservation"):
        assert env["PRICE_PER_CHIP_HOUR"] == ""

    assert train["base_config"] == "base.yml"
    assert train["model_name"] == env["MODEL"]
    assert train["run_name"] == env["RUN_NAME"]
    assert train["steps"] == int(env["STEPS"]) >= train["checkpoint_period"]
    for key in ("base_output_directory", "jax_cache_dir"):
        assert train[key].startswith(f"gs://{env['BUCKET']}/{env['PROJECT_NAME']}"), key
    assert train["dataset_type"] == job.get("dataset_type", "synthetic")
    given = job.get("dataset_path", "")
    assert (train.get("grain_train_files") or train.get("hf_train_files") or train.get("hf_path") or "") in (
        given,
        given.removesuffix("/en"),
    )
    assert train["tokenizer_path"]
    if train["dataset_type"] == "hf":
        assert train["tokenizer_type"] == "huggingface"

    flags = [line for line in (project / "config/libtpu.flags").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"--xla_[a-z0-9_]+=[A-Za-z0-9_]+", flag) for flag in flags)
    # A plan has its flags with its settings; on v4 there are none.
    assert bool(flags) == ("remat_policy" in train and bool(facts.recipe_flags("recompute", env["GENERATION"])))


@pytest.mark.parametrize("job", JOBS, ids=[" ".join(map(str, job.values())) for job in JOBS])
def test_every_pair_of_choices_renders_files_that_agree(
    job: dict[str, Any], in_process: Render, tmp_path: Path
) -> None:
    assert_agrees(in_process(tmp_path / "p", **job), job)


def test_the_matrix_has_every_choice_of_every_question() -> None:
    """Also a choice that is added to copier.yml or the tables tomorrow."""
    seen = {name: {job[name] for job in JOBS if name in job} for name in CONFIG if not name.startswith("_")}
    resolved = {
        "generation": set(facts.GENERATIONS),
        "topology": {topology for name in facts.GENERATIONS for topology in facts.topologies(name)},
        "model": set(facts.MODELS),
        "capacity": {c for name in facts.GENERATIONS for c in facts.capacities(name)},
    }
    for name, question in CONFIG.items():
        if not name.startswith("_") and "choices" in question:
            choices = question["choices"]
            assert seen[name] >= (set(choices) if isinstance(choices, list) else resolved[name]), name
    assert {(job["generation"], job.get("topology")) for job in JOBS} >= {tuple(key.split()) for key in CHECKED}
    for a, b in itertools.combinations(["generation", "capacity", "cluster_mode", "model", "dataset_type"], 2):
        pairs = {(job[a], job[b]) for job in JOBS if a in job and b in job}
        impossible = {("v4", "flex-start")} if (a, b) == ("generation", "capacity") else set()
        if (a, b) == ("generation", "model"):
            impossible = {(g, m) for g in facts.GENERATIONS for m in facts.MODELS if not facts.smallest_topology(m, g)}
        assert pairs >= set(itertools.product(seen[a], seen[b])) - impossible, (a, b)


WHOLE: list[dict[str, Any]] = [
    {},
    {"generation": "v4", "topology": "2x4x4", "num_slices": 2, "capacity": "spot", "model": "mixtral-8x7b"},
    {"generation": "v5e", "topology": "2x4", "cluster_mode": "autopilot", "model": "qwen3-0.6b"},
    {
        "generation": "v5p",
        "topology": "4x4x8",
        "capacity": "reservation",
        "reservation": "projects/my-own/reservations/r-1",
    },
    {"topology": "1x1", "model": "qwen3-1.7b", "dataset_type": "hf", "dataset_path": "allenai/c4/en"},
    {"generation": "tpu7x", "capacity": "flex-start", "model": "gpt-oss-120b", "topology": "4x4x4"},
    {"generation": "tpu7x", "num_slices": 3, "cluster_mode": "autopilot", "project_id": "example.com:my-project"},
]


def documents(project: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((project / "k8s").rglob("*.yaml")):
        yield from filter(None, yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("job", WHOLE, ids=[" ".join(map(str, job.values())) or "defaults" for job in WHOLE])
def test_a_whole_repository_agrees_on_the_slice(job: dict[str, Any], render: Render) -> None:
    project = render(**job)
    assert_agrees(project, job)
    env = read_env(project / "run.env")
    clusters = [document for document in documents(project) if document["kind"] == "RayCluster"]
    assert clusters
    for cluster in clusters:
        assert cluster["metadata"]["name"] == env["RAYCLUSTER_NAME"]
        (group,) = cluster["spec"]["workerGroupSpecs"]
        pod = group["template"]["spec"]
        assert group["numOfHosts"] == int(env["HOSTS_PER_SLICE"])
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == int(env["NUM_SLICES"])
        selector = pod["nodeSelector"]
        assert selector["cloud.google.com/gke-tpu-accelerator"] == env["GKE_ACCELERATOR"]
        assert selector["cloud.google.com/gke-tpu-topology"] == env["TOPOLOGY"]
        resources = pod["containers"][0]["resources"]
        for side in ("requests", "limits"):
            assert resources[side]["google.com/tpu"] == env["CHIPS_PER_HOST"]
        assert int(resources["limits"]["memory"].removesuffix("Gi")) < int(env["RAM_GIB_PER_HOST"])
        assert pod["serviceAccountName"] == env["SERVICE_ACCOUNT"]
    for document in documents(project):
        for key, value in document.get("metadata", {}).items():
            if key in ("name", "namespace"):
                assert isinstance(value, str), document["kind"]


def test_rendering_twice_gives_the_same_bytes(render: Render, tmp_path: Path) -> None:
    first, second = render(), render()
    assert first != second
    names = sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(second)) for path in second.rglob("*") if path.is_file())
    same, differ, odd = filecmp.cmpfiles(first, second, names, shallow=False)
    assert (differ, odd) == ([], [])
    assert set(same) == set(names)


RESERVED = {"con", "prn", "aux", "nul", *(f"{kind}{n}" for kind in ("com", "lpt") for n in range(1, 10))}


def test_files_can_be_checked_out_on_windows_and_have_unix_line_ends(render: Render) -> None:
    project = render()
    seen: set[str] = set()
    for path in project.rglob("*"):
        for part in path.relative_to(project).parts:
            assert not re.search(r'[<>:"|?*\\]|[. ]$', part), path
            assert part.split(".")[0].lower() not in RESERVED, path
        lower = str(path.relative_to(project)).lower()
        assert lower not in seen, path
        seen.add(lower)
        if path.is_file():
            content = path.read_bytes()
            assert b"\r" not in content, path
            assert not content or content.endswith(b"\n"), path
            assert not path.name.endswith(".jinja"), path


def test_no_answer_and_no_folder_of_this_machine_leaks_into_the_files(render: Render, tmp_path: Path) -> None:
    project = render()
    for path in project.rglob("*"):
        if path.is_file() and path.name != ".copier-answers.yml":
            text = path.read_text(encoding="utf-8")
            assert str(ROOT) not in text, path
            assert str(project) not in text, path
            assert not re.search(r"/home/[a-z]|/Users/[a-z]", text), path


def test_tuned_settings_are_used_only_with_the_answers_that_they_were_tuned_for(
    in_process: Render, tmp_path: Path, questionnaire: ModuleType
) -> None:
    changes: list[dict[str, Any]] = [
        {"sequence_length": "2048"},
        {"per_device_batch_size": "5"},
        {"ici_parallelism": "fsdp=4,tensor=4"},
    ]
    plan = facts.plan_for("llama3-8b", "v6e", "4x4", 1)
    own = {"per_device_batch_size": str(plan.per_device_batch_size), "sequence_length": str(plan.sequence_length)}
    for index, change in enumerate([{}, own, *changes]):
        project = in_process(tmp_path / str(index), **change)
        text = (project / "config/train.yml").read_text()
        train = yaml.safe_load(text)
        tuned = change not in changes
        assert ("remat_policy" in train) == tuned, change
        assert ("--xla" in (project / "config/libtpu.flags").read_text()) == tuned, change
        assert ("Compiled for v6e-16" in text) == tuned, change
        if tuned:
            assert (train["per_device_batch_size"], train["max_target_length"]) == plan[1::-1]


def test_a_larger_slice_takes_the_plan_of_a_smaller_one_and_says_so(in_process: Render, tmp_path: Path) -> None:
    project = in_process(tmp_path / "p", topology="16x16")
    text = (project / "config/train.yml").read_text()
    assert "remat_policy" in yaml.safe_load(text)
    assert "Not compiled for this run's slices: `make preflight` tells" in " ".join(text.replace("#", " ").split())


def test_every_generation_has_its_flags_and_blocks_divide_the_sequence() -> None:
    of_groups = [generation for group in facts.PLANS["flags"].values() for generation in group["generations"]]
    assert sorted(of_groups) == sorted(facts.GENERATIONS)
    for group in facts.PLANS["flags"].values():
        assert len(group["flags"]) == len(set(group["flags"]))
    for name, recipe in facts.PLANS["recipe"].items():
        for key, value in recipe["settings"].items():
            if key.startswith("sa_block"):
                assert facts.PLANS["default"]["sequence_length"] % value == 0, (name, key)


def test_the_table_of_plans_is_consistent() -> None:
    """Every row is of a job that exists; what fits has all its figures and lies under the compiler's limit."""
    assert facts.COMPILED
    for row in facts.COMPILED:
        assert tuple(row) == facts.COLUMNS
        assert row["topology"] in facts.topologies(row["generation"]), row
        assert row["recipe"] in facts.PLANS["recipe"], row
        assert row["model"] in facts.MODELS, row
        # After a change of a recipe its rows are to be removed, and made again by `make plans`.
        assert row["configuration"] == facts.recipe_fingerprint(row["recipe"], row["generation"]), row
        if not row["problem"]:
            assert 0 < float(row["hbm_gib"]) <= facts.GENERATIONS[row["generation"]]["hbm_gib_per_device"], row
            assert float(row["tokens_per_second"]) > 0, row
            assert 0 < float(row["mfu"]) < 1, row
    keys = [tuple(row[name] for name in facts.COLUMNS[:7]) for row in facts.COMPILED]
    assert len(keys) == len(set(keys))


def test_every_offered_default_has_a_plan_that_fits_or_says_that_it_is_not_proven() -> None:
    for generation, model in itertools.product(facts.GENERATIONS, facts.MODELS):
        for topology in facts.topologies(generation):
            if facts.can_fit(model, generation, topology):
                plan = facts.plan_for(model, generation, topology, 1)
                limit = facts.GENERATIONS[generation]["hbm_gib_per_device"]
                error = 0 if plan.compiled else facts.FORMULA_ERROR
                assert plan.hbm_gib <= limit * (1 + error)
                assert plan.compiled or "make preflight" in plan.source


def test_no_plan_is_what_the_compiler_refused() -> None:
    """Also not through another job's row: two slices need more than the one that a plan was compiled for."""
    refused = [row for row in facts.COMPILED if row["problem"]]
    assert any(row["num_slices"] == "2" for row in refused)
    for row in refused:
        plan = facts.plan_for(row["model"], row["generation"], row["topology"], int(row["num_slices"]))
        configuration = (plan.per_device_batch_size, plan.settings, plan.flags)
        recipe = row["recipe"]
        settings, flags = facts.recipe_settings(recipe), facts.recipe_flags(recipe, row["generation"])
        if facts.can_fit(row["model"], row["generation"], row["topology"]):
            assert configuration != (float(row["per_device_batch_size"]), settings, flags), row


def test_the_default_job_is_estimated_well_above_the_tutorial() -> None:
    """Without offload to the host, whose memory the tutorial's pods limit."""
    plan = facts.plan_for("llama3-8b", "v6e", "4x4", 1)
    tutorial = facts.PLANS["tutorial"]
    assert plan.compiled
    assert plan.tokens_per_second >= 2.5 * tutorial["published"]
    assert plan.tokens_per_second >= 2.5 * tutorial["estimated"]
    assert "offload" not in plan.settings.values()
