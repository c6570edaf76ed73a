"""What is typed is either refused or read back exactly by sh, make, YAML and Python, for every text question."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from copier._jinja_ext import SandboxedEnvironment
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jinja2 import FileSystemLoader, StrictUndefined

from extensions import questionnaire
from template.ops import run_env
from tests.conftest import ANSWER_FILES, ROOT, read_env

CONFIG = yaml.safe_load((ROOT / "copier.yml").read_text(encoding="utf-8"))
TEXT = [
    name
    for name, question in CONFIG.items()
    if not name.startswith("_")
    and question["type"] == "str"
    and "choices" not in question
    and question.get("when") is not False
]
# Where in the emitted files a text answer stands: run.env by key, config/train.yml by a function of it.
IN_ENV = {
    "project_name": "PROJECT_NAME",
    "project_id": "PROJECT_ID",
    "zone": "ZONE",
    "bucket": "BUCKET",
    "reservation": "RESERVATION",
    "cluster_name": "CLUSTER_NAME",
    "namespace": "NAMESPACE",
    "service_account": "SERVICE_ACCOUNT",
    "registry": "REGISTRY",
    "run_name": "RUN_NAME",
}
IN_TRAIN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "run_name": lambda train: train["run_name"],
    "bucket": lambda train: train["base_output_directory"].removeprefix("gs://").split("/")[0],
    "project_name": lambda train: train["base_output_directory"].removeprefix("gs://").split("/")[1],
    "tokenizer": lambda train: train["tokenizer_path"],
    "dataset_path": lambda train: train["grain_train_files"],
    "sequence_length": lambda train: str(train["max_target_length"]),
    "per_device_batch_size": lambda train: train["per_device_batch_size"],
    "ici_parallelism": lambda train: mesh_of(train, "ici"),
    "dcn_parallelism": lambda train: mesh_of(train, "dcn"),
}
# Answers that make a question count.
SURROUND: dict[str, dict[str, Any]] = {
    "reservation": {"capacity": "reservation", "reservation": "mine"},
    "dataset_path": {"dataset_type": "grain", "dataset_path": "/data/a"},
    "dcn_parallelism": {"num_slices": 4},
    "per_device_batch_size": {"ici_parallelism": "tensor=16"},
}
GOOD = {
    "project_name": ["my-tpu-run", "a", "x" * 35],
    "project_id": ["my-project-123", "example.com:my-project", "e-1.co.uk:my-project"],
    "zone": ["us-east5-b", "us-central1-ai1a", "northamerica-northeast1-c"],
    "bucket": ["my-data", "my_data.v2", "1-data", "a.b"],
    "reservation": ["mine", "projects/my-owner/reservations/m-1/reservationBlocks/b/reservationSubBlocks/s"],
    "cluster_name": ["my-cluster", "c" * 40],
    "namespace": ["ray", "team-a"],
    "service_account": ["ray-train"],
    "registry": ["my-images"],
    "run_name": ["run-1"],
    "sequence_length": ["128", "4096", "1048576"],
    "ici_parallelism": ["fsdp=-1", "fsdp=4,tensor=4", "data=2,fsdp=8", "context=16", "fsdp=8,fsdp_transpose=2"],
    "dcn_parallelism": ["data=-1", "data=2,fsdp=2", "fsdp=4"],
    "per_device_batch_size": ["1", "6", "0.0625", "1.5", "64"],
    "dataset_path": ["gs://my-bucket/c4/*.parquet", "/data/c4/part-0000?.parquet", "gs://b-1/k=v/x.array_record"],
    "tokenizer": ["org-1/some.Tokenizer_2", "/data/tok/tokenizer.model", "tokenizer_llama3.tiktoken"],
}
HOSTILE = [
    "", " ", "My-Run", "run one", " run", "run ", "run\n", "run\nSTEPS=1", "run\r", "run\t1", "run\x00", "1run", "-run",
    "run-", "--help", "run#1", "#run", "run$(id)", "`id`", "$HOME", "${HOME}", "$$", "run;id", "run&id", "run|id",
    "run>x", "'run'", '"run"', "run'", 'run"', "run\\", "run\\n", "a=b", "a:b", "a: b", "a,b", "[a]", "{a: b}", "*a",
    "&a", "!a", "%a", "@a", "~", "?", "|", ">", "yes", "no", "Yes", "on", "off", "y", "n", "true", "false", "null",
    "none", "None", ".nan", ".inf", "1e3", "0x10", "0o17", "0b1", "1_000", "010", "12:30", "1.0", "2026-11-30",
    "{{ 1 }}", "{% raw %}", "{#", "é", "run-é", "\N{ZERO WIDTH SPACE}run", "run\N{NO-BREAK SPACE}",
    "\N{FULLWIDTH LATIN SMALL LETTER A}", "\N{ARABIC-INDIC DIGIT ONE}", "a/../b", "../a", "/etc/passwd", "~/a",
    "gs://", "gs://a", "C:\\run", "con", "x" * 1000, "\N{ROCKET}", "<<: *a", "- a", "a\u2028b", "\ufeffrun",
]  # fmt: skip


def mesh_of(train: dict[str, Any], network: str) -> dict[str, int]:
    sizes = {
        key.removeprefix(f"{network}_").removesuffix("_parallelism"): value
        for key, value in train.items()
        if key.startswith(f"{network}_")
    }
    return {axis: size for axis, size in sizes.items() if size != 1}


def test_every_text_question_is_covered_here() -> None:
    assert set(GOOD) == set(TEXT)
    assert set(IN_ENV) | set(IN_TRAIN) == set(TEXT)


class Renderer:
    """Renders the answer files with the template's own extension and Copier's Jinja environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = SandboxedEnvironment(
            loader=FileSystemLoader([str(ROOT)]),
            extensions=["jinja2_ansible_filters.AnsibleCoreFiltersExtension", questionnaire.Questionnaire],
            undefined=StrictUndefined,
            **{key: value for key, value in CONFIG["_envops"].items() if key != "undefined"},
        )

    def answers(self, **given_answers: Any) -> dict[str, Any]:
        """The given answers and the defaults of copier.yml for the others, derived ones included."""
        context: dict[str, Any] = {"_copier_conf": {"defaults": True, "data": {}}, "_copier_phase": "render"}
        for name, question in CONFIG.items():
            if name.startswith("_"):
                continue
            value = given_answers.get(name, question["default"])
            if name not in given_answers and isinstance(value, str):
                value = self.environment.from_string(value).render(**context)
            read: dict[str, Callable[[Any], Any]] = {"int": int, "str": str}
            if isinstance(value, str):  # a default may stand in copier.yml as what it is
                value = read.get(question["type"], yaml.safe_load)(value)
            context[name] = value
        return context

    def render(self, context: dict[str, Any]) -> None:
        for name in ANSWER_FILES:
            target = self.folder / name.removesuffix(".jinja")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(self.environment.get_template(f"template/{name}").render(**context), newline="")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("render")
    (folder / "Makefile").write_text("include run.env\nall:\n\t@:\n$(foreach key,$(KEYS),$(info $(key)=$($(key))))\n")
    return Renderer(folder)


def test_this_renderer_gives_the_bytes_that_copier_gives(renderer: Renderer, in_process: Any, tmp_path: Path) -> None:
    for job in ({}, {"generation": "tpu7x", "model": "mixtral-8x7b", "num_slices": 2}):
        project = in_process(tmp_path / str(len(job)), **job)
        renderer.render(renderer.answers(**job))
        for name in ANSWER_FILES:
            file = name.removesuffix(".jinja")
            assert (renderer.folder / file).read_bytes() == (project / file).read_bytes()


def read_by_sh(folder: Path, keys: list[str]) -> dict[str, str]:
    script = '. ./run.env; for key in "$@"; do eval "printf \'%s=%s\\0\' \\"\\$key\\" \\"\\$$key\\""; done'
    done = subprocess.run(
        ["/bin/sh", "-eu", "-c", script, "sh", *keys], cwd=folder, check=True, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nowhere"},
    )  # fmt: skip
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if item)


def read_by_make(folder: Path, keys: list[str]) -> dict[str, str]:
    done = subprocess.run(
        ["make", "--no-print-directory", f"KEYS={' '.join(keys)}"],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def assert_read_back(renderer: Renderer, name: str, value: str, context: dict[str, Any]) -> None:
    renderer.render(context)
    env = read_env(renderer.folder / "run.env")
    assert read_by_sh(renderer.folder, list(env)) == env
    assert read_by_make(renderer.folder, list(env)) == env
    assert run_env.read(renderer.folder / "run.env") == env
    if name in IN_ENV:
        assert env[IN_ENV[name]] == value
    train = yaml.safe_load((renderer.folder / "config/train.yml").read_text(encoding="utf-8"))
    if name in IN_TRAIN and value != "auto":
        read = IN_TRAIN[name](train)
        if name.endswith("_parallelism"):
            assert read == {a: s for a, s in questionnaire.facts.mesh(value).items() if s != 1}
        elif name == "per_device_batch_size":
            assert read == float(value)
        else:
            assert read == value


ALPHABET = st.one_of(
    st.sampled_from("abcxyz019-._:/=,@*?"),
    st.sampled_from("ABZ \t\n\r'\"`$(){}[]#&;|<>\\!%~^+"),
    st.characters(),
)


def typed(name: str) -> st.SearchStrategy[str]:
    """Anything, hostile words, and good answers with a few characters changed."""

    def changed(value: str, at: int, insert: str, drop: int) -> str:
        at %= len(value) + 1
        return value[:at] + insert + value[at + drop :]

    mutated = st.builds(
        changed, st.sampled_from(GOOD[name]), st.integers(0, 99), st.text(ALPHABET, max_size=3), st.integers(0, 2)
    )
    plain = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,40}", fullmatch=True)
    return st.one_of(mutated, st.sampled_from(HOSTILE), plain, st.text(ALPHABET, max_size=40))


@pytest.mark.parametrize("name", TEXT)
def test_what_is_typed_is_refused_or_read_back_exactly(name: str, renderer: Renderer) -> None:
    surround = renderer.answers(**SURROUND.get(name, {}))

    @settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(typed(name))
    def check(value: str) -> None:
        refusal = questionnaire.rules.RULES[name](value, surround)
        if refusal:
            assert refusal.startswith(f"{name}: ")
            assert "\n" not in refusal
        else:
            assert_read_back(renderer, name, value, renderer.answers(**{**SURROUND.get(name, {}), name: value}))

    for value in GOOD[name]:
        assert questionnaire.rules.RULES[name](value, surround) == "", value
        check = example(value)(check)
    for value in HOSTILE:
        check = example(value)(check)
    check()


@pytest.mark.parametrize("name", sorted(IN_ENV))
@pytest.mark.parametrize(
    "value", ["Upper", "é", "1e3", "null", "yes", "a b", "$(id)", "`id`", "a\nb", "a'", 'a"', "a-"]
)
def test_a_name_that_a_shell_or_yaml_would_misread_is_refused(name: str, value: str, renderer: Renderer) -> None:
    assert questionnaire.rules.RULES[name](value, renderer.answers(**SURROUND.get(name, {})))


@pytest.mark.parametrize("name", [n for n, q in CONFIG.items() if not n.startswith("_") and q["type"] == "int"])
@given(value=st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.sampled_from(HOSTILE), st.text()))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_a_number_is_refused_or_is_the_whole_number_typed(name: str, value: Any) -> None:
    slices = {"num_slices": 4, "dcn_parallelism": "data=-1", "dataset_type": "synthetic", "model": "llama3-8b"}
    answers = {"steps": 100, "generation": "v6e", "topology": "4x4"} | slices
    if not questionnaire.rules.RULES[name](value, answers):
        assert not isinstance(value, (bool, float))
        assert str(int(value)) == str(value)
        assert 0 <= int(value) <= 100_000_000
