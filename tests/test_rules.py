"""Every rule refuses through the real command, wherever the answer comes from, and says what would work."""

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml
from copier._cli import CopierApp

from tests.conftest import commit_all, copier, data_arguments, git, read_env


class Refusal(NamedTuple):
    wrong: dict[str, Any]
    """Answers, the last of which is refused."""
    says: str
    """Part of the sentence."""
    works: dict[str, Any]
    """What the sentence says would work, on top of the other answers."""


LONG = "a" * 36
REFUSALS = [
    Refusal({"project_name": "My-Run"}, "lower-case", {"project_name": "my-tpu-run"}),
    Refusal({"project_name": "1st-run"}, "start with a letter", {"project_name": "my-tpu-run"}),
    Refusal({"project_name": "run-"}, "end with a letter or digit", {"project_name": "my-tpu-run"}),
    Refusal({"project_name": LONG}, "at most 35", {"project_name": LONG[:35]}),
    Refusal({"project_name": "null"}, "YAML", {"project_name": "my-null"}),
    Refusal({"project_id": "short"}, "6 to 30", {"project_id": "my-project-123"}),
    Refusal({"project_id": "123456789012"}, "number", {"project_id": "my-project-123"}),
    Refusal({"project_id": "Example.com:my-project"}, "6 to 30", {"project_id": "example.com:my-project"}),
    Refusal({"generation": "v7"}, "v4, v5e, v5p, v6e, tpu7x", {"generation": "tpu7x"}),
    Refusal({"generation": "v5p", "topology": "4x4"}, "for v5p", {"topology": "2x2x4"}),
    Refusal({"topology": "2x8"}, "not offered for v6e", {"topology": "4x8"}),
    Refusal({"zone": "us-east5"}, "is a region", {"zone": "us-east5-b"}),
    Refusal({"zone": "here"}, "not a zone", {"zone": "us-east5-b"}),
    Refusal({"model": "deepseek3-tiny"}, "a test configuration", {"model": "deepseek2-16b"}),
    Refusal({"bucket": "gs://my-data/x"}, "without gs://", {"bucket": "my-data"}),
    Refusal({"bucket": "my..data"}, "no dot beside", {"bucket": "my-project-maxtext"}),
    Refusal({"bucket": "goog-data"}, "goog", {"bucket": "my-project-maxtext"}),
    Refusal({"bucket": "my-g00gle-data"}, "google", {"bucket": "my-project-maxtext"}),
    Refusal({"bucket": "10.0.0.1"}, "IP address", {"bucket": "my-project-maxtext"}),
    Refusal({"bucket": "0x10"}, "YAML", {"bucket": "my-0x10"}),
    Refusal({"num_slices": 0}, "from 1 to 256", {"num_slices": 1}),
    Refusal({"num_slices": "1_0"}, "whole number", {"num_slices": 10}),
    Refusal({"topology": "2x4", "num_slices": 2}, "is one host", {"topology": "4x4"}),
    Refusal({"generation": "v4", "capacity": "flex-start"}, "for v4", {"capacity": "spot"}),
    Refusal({"capacity": "reserved"}, "on-demand, spot", {"capacity": "reservation", "reservation": "mine"}),
    Refusal({"reservation": "mine"}, "capacity is on-demand", {"capacity": "reservation"}),
    Refusal(
        {"capacity": "reservation", "reservation": "projects/x/mine"},
        "projects/OWNER/reservations/NAME",
        {"reservation": "projects/my-owner/reservations/mine/reservationBlocks/b-1"},
    ),
    Refusal({"capacity": "reservation", "reservation": ""}, "must name", {"reservation": "my-reservation"}),
    Refusal({"cluster_mode": "gke"}, "standard, autopilot", {"cluster_mode": "autopilot"}),
    Refusal({"cluster_name": "a" * 41}, "GKE's limit", {"cluster_name": "a" * 40}),
    Refusal({"namespace": "kube-system"}, "belongs to the system", {"namespace": "ray"}),
    Refusal({"service_account": "me@project"}, "lower-case", {"service_account": "ray-train"}),
    Refusal({"registry": "us-docker.pkg.dev/p/r"}, "name alone", {"registry": "my-images"}),
    Refusal({"run_name": "run one"}, "lower-case", {"run_name": "run-2"}),
    Refusal({"sequence_length": "5000"}, "multiples of 512", {"sequence_length": "4096"}),
    Refusal({"ici_parallelism": "fsdp=4,tensor=3"}, "the 16 devices of a v6e 4x4", {"ici_parallelism": "fsdp=-1"}),
    Refusal({"ici_parallelism": "fsdp=-1,data=-1"}, "more than one", {"ici_parallelism": "fsdp=-1,data=2"}),
    Refusal({"ici_parallelism": "sequence=16"}, "has sequence, not a mesh axis", {"ici_parallelism": "context=16"}),
    Refusal({"ici_parallelism": "fsdp"}, "axis=size", {"ici_parallelism": "fsdp=16"}),
    Refusal({"ici_parallelism": "fsdp=4,expert=4"}, "has none", {"model": "deepseek2-16b"}),
    Refusal({"model": "llama3-70b"}, "does not fit on one v6e 4x4 slice", {"topology": "8x16"}),
    Refusal({"num_slices": 3, "dcn_parallelism": "data=2"}, "the 3 slice(s)", {"dcn_parallelism": "data=3"}),
    Refusal({"num_slices": 2, "dcn_parallelism": "tensor=2"}, "slower than ICI", {"dcn_parallelism": "data=-1"}),
    Refusal({"per_device_batch_size": "0.5"}, "16 ways", {"ici_parallelism": "fsdp=8,tensor=2"}),
    Refusal({"per_device_batch_size": "1e1"}, "number above 0", {"per_device_batch_size": "10"}),
    Refusal({"steps": "many"}, "whole number of steps", {"steps": 10_000}),
    Refusal({"steps": 10, "checkpoint_period": 20}, "at most 10", {"checkpoint_period": 10}),
    Refusal({"checkpoints_kept": 1}, "from 2", {"checkpoints_kept": 2}),
    Refusal({"max_failures": -1}, "from 0", {"max_failures": 0}),
    Refusal({"dataset_type": "c4"}, "synthetic, hf, grain", {"dataset_type": "synthetic"}),
    Refusal({"dataset_path": "allenai/c4"}, "dataset_type is synthetic", {"dataset_type": "hf"}),
    Refusal(
        {"dataset_type": "grain", "dataset_path": "allenai/c4"},
        "files for Grain",
        {"dataset_path": "gs://my-bucket/c4/*.parquet"},
    ),
    Refusal({"dataset_format": "tfrecord"}, "parquet, arrayrecord", {"dataset_format": "arrayrecord"}),
    Refusal({"tokenizer": "google/gemma-2b"}, "vocabulary", {"tokenizer": "auto"}),
    Refusal(
        {"dataset_type": "hf", "dataset_path": "allenai/c4", "tokenizer": "tokenizer_llama3.tiktoken"},
        "Hugging Face tokenizers only",
        {"tokenizer": "meta-llama/Meta-Llama-3-8B"},
    ),
    Refusal({"num_slices": 2, "min_slices": 3}, "from 0 to 2", {"min_slices": 1}),
    Refusal(
        {"num_slices": 4, "dcn_parallelism": "data=4", "min_slices": 2},
        "needs dcn_parallelism=data=-1",
        {"dcn_parallelism": "data=-1"},
    ),
    Refusal(
        {"num_slices": 2, "dcn_parallelism": "fsdp=-1", "min_slices": 1},
        "gives a device more to hold",
        {"dcn_parallelism": "data=-1"},
    ),
    Refusal(
        {"num_slices": 2, "dataset_type": "grain", "dataset_path": "gs://my-bucket/c4/*", "min_slices": 1},
        "only on the same number",
        {"min_slices": 0},
    ),
    # What Copier itself would ignore or take over without a word.
    Refusal({"toplogy": "4x4"}, "Did you mean: topology", {"toplogy": None, "topology": "4x4"}),
    Refusal({"slice": "{}"}, "follows from generation and topology", {"slice": None, "generation": "v5p"}),
    Refusal({"region": "us-east1"}, "follows from zone", {"region": None, "zone": "us-east1-d"}),
]
IDS = [" ".join(f"{k}={v}" for k, v in r.wrong.items())[:60] for r in REFUSALS]
# Checkpointing that does not start under JaxTrainer has no question at all.
NEVER_OFFERED = ["enable_emergency_checkpoint", "enable_multi_tier_checkpointing", "local_checkpoint_directory"]


def run_copier(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """The copier command inside this process: exit code and what it printed to stderr."""
    capfd.readouterr()
    _, code = CopierApp.run(["copier", *map(str, arguments)], exit=False)
    return code, capfd.readouterr().err


def assert_refused(code: int, printed: str, refusal: Refusal) -> None:
    name, value = list(refusal.wrong.items())[-1]
    lines = [line for line in printed.replace("\x1b[31m", "").replace("\x1b[39m", "").splitlines() if line.strip()]
    assert code == 1
    assert "Traceback" not in printed
    assert refusal.says in lines[-1]
    assert name in lines[-1]
    assert str(value)[:20] in lines[-1] or name in ("slice", "region", "toplogy")


@pytest.mark.parametrize("refusal", REFUSALS, ids=IDS)
def test_data_is_refused_in_one_sentence_and_nothing_is_written(
    refusal: Refusal, small_template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "project"
    code, printed = run_copier(
        capfd, "copy", "--trust", "--defaults", "--quiet", *data_arguments(refusal.wrong), small_template, target
    )
    assert_refused(code, printed, refusal)
    assert len(printed.splitlines()) <= 2
    assert not target.exists()


@pytest.mark.parametrize("refusal", REFUSALS, ids=IDS)
def test_a_data_file_is_refused_alike(
    refusal: Refusal, small_template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target, answers = tmp_path / "project", tmp_path / "answers.yml"
    answers.write_text(yaml.safe_dump(refusal.wrong))
    code, printed = run_copier(
        capfd, "copy", "--trust", "--defaults", "--quiet", "--data-file", answers, small_template, target
    )
    assert_refused(code, printed, refusal)
    assert not target.exists()


@pytest.fixture(scope="module")
def project(small_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed repository made from a tagged template."""
    folder = tmp_path_factory.mktemp("update")
    source = folder / "template"
    shutil.copytree(small_template, source)
    commit_all(source, "v99.0.0")
    target = folder / "project"
    done = copier("copy", "--trust", "--defaults", "--quiet", source, target)
    assert done.returncode == 0, done.stderr
    commit_all(target)
    return target


@pytest.mark.parametrize("refusal", REFUSALS, ids=IDS)
def test_an_update_is_refused_alike_and_changes_nothing(
    refusal: Refusal, project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, printed = run_copier(
        capfd,
        "update",
        "--trust",
        "--defaults",
        "--quiet",
        "--vcs-ref=:current:",
        *data_arguments(refusal.wrong),
        project,
    )
    assert_refused(code, printed, refusal)
    assert git(project, "status", "--porcelain") == ""


@pytest.mark.parametrize("refusal", REFUSALS, ids=IDS)
def test_what_a_refusal_names_works(refusal: Refusal, in_process: Any, tmp_path: Path) -> None:
    answers = {k: v for k, v in {**refusal.wrong, **refusal.works}.items() if v is not None}
    assert (in_process(tmp_path / "project", **answers) / "run.env").exists()


def test_every_question_has_a_rule_that_is_seen_to_refuse(
    questions: dict[str, dict[str, Any]], questionnaire: ModuleType
) -> None:
    answered = [name for name, question in questions.items() if question.get("when") is not False]
    assert list(questionnaire.rules.RULES) == answered
    assert {list(r.wrong)[-1] for r in REFUSALS} >= set(answered)
    assert questionnaire.rules.DERIVED.keys() == {n for n, q in questions.items() if q.get("when") is False}


def test_every_text_and_number_is_validated_by_its_own_rule(questions: dict[str, dict[str, Any]]) -> None:
    for name, question in questions.items():
        if question.get("when") is not False and "choices" not in question:
            assert question["validator"] == f"{{{{ problem('{name}') }}}}"


def test_a_reservation_or_dataset_without_its_name_asks_for_it_by_name(small_template: Path, tmp_path: Path) -> None:
    for given, needed in (({"capacity": "reservation"}, "reservation"), ({"dataset_type": "hf"}, "dataset_path")):
        done = copier(
            "copy", "--trust", "--defaults", "--quiet", *data_arguments(given), small_template, tmp_path / "project"
        )
        assert done.returncode == 1
        assert f"Add --data {needed}=..." in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "project").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("bucket: 123", "Put it in quotes"),
        ("project_name: yes", "Put it in quotes"),
        ("zone:", "Put it in quotes"),
        ("tokenizer: [a]", "Put it in quotes"),
        ("steps: null", "whole number"),
        ("steps: true", "whole number"),
        ("steps: 1.5", "whole number"),
        ("generation: 6", "not offered"),
    ],
)
def test_what_yaml_made_of_a_data_file_is_refused_before_it_is_misread(
    line: str, says: str, small_template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "answers.yml"
    answers.write_text(line + "\n")
    code, printed = run_copier(
        capfd, "copy", "--trust", "--defaults", "--quiet", "--data-file", answers, small_template, tmp_path / "project"
    )
    assert (code, "Traceback" in printed) == (1, False), printed
    assert says in printed
    assert not (tmp_path / "project").exists()


def test_an_answers_file_edited_into_nonsense_is_refused_on_update(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    edited = tmp_path / "project"
    shutil.copytree(project, edited)
    answers = edited / ".copier-answers.yml"
    answers.write_text(answers.read_text().replace("topology: 4x4", "topology: 5x5"))
    commit_all(edited)
    code, printed = run_copier(capfd, "update", "--trust", "--defaults", "--quiet", "--vcs-ref=:current:", edited)
    assert (code, "Traceback" in printed) == (1, False), printed
    assert "'5x5' is not offered for v6e" in printed
    assert git(edited, "status", "--porcelain") == ""


def test_answers_follow_the_one_that_they_depend_on(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A recorded answer that no longer fits goes back to its default instead of staying wrong."""
    moved = tmp_path / "project"
    shutil.copytree(project, moved)

    def update(**answers: Any) -> dict[str, str]:
        code, printed = run_copier(
            capfd, "update", "--trust", "--defaults", "--quiet", "--vcs-ref=:current:", *data_arguments(answers), moved
        )
        assert code == 0, printed
        commit_all(moved)
        return read_env(moved / "run.env")

    assert update(ici_parallelism="fsdp=8,tensor=2", num_slices=2)["NUM_SLICES"] == "2"
    env = update(generation="v5p")
    assert (env["TOPOLOGY"], env["NUM_SLICES"], env["ZONE"]) == ("2x2x2", "2", "us-east5-b")
    train = yaml.safe_load((moved / "config/train.yml").read_text())
    assert train["ici_fsdp_parallelism"] == -1
    assert update(topology="2x2x1", num_slices=1)["HOSTS_PER_SLICE"] == "1"
    assert update(capacity="reservation", reservation="mine")["RESERVATION"] == "mine"
    assert update(capacity="spot")["RESERVATION"] == ""
    update(model="gemma3-4b")
    assert yaml.safe_load((moved / "config/train.yml").read_text())["tokenizer_path"] == "tokenizer.gemma3"


def test_an_unknown_zone_is_accepted_with_a_warning(template: Path, tmp_path: Path) -> None:
    for zone, warned in (("us-east5-b", False), ("us-central1-ai1a", True), ("northamerica-northeast1-c", True)):
        done = copier("copy", "--trust", "--defaults", "--data", f"zone={zone}", template, tmp_path / zone)
        assert done.returncode == 0, done.stderr
        assert ("is not among the zones known for v6e" in done.stderr) == warned
        assert read_env(tmp_path / zone / "run.env")["REGION"] == zone.rsplit("-", 1)[0]


@pytest.mark.parametrize("key", NEVER_OFFERED)
def test_checkpointing_that_does_not_start_under_jaxtrainer_cannot_be_asked_for(
    key: str, small_template: Path, tmp_path: Path
) -> None:
    done = copier("copy", "--trust", "--defaults", "--data", f"{key}=true", small_template, tmp_path / "project")
    assert done.returncode == 1
    assert f"There is no question '{key}'" in done.stderr
