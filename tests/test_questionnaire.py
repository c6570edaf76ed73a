"""The questionnaire as a person meets it, and copier.yml as Copier reads it."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pexpect
import pytest
import yaml
from copier import run_copy, run_update
from copier._template import Template
from copier._user_data import Question
from jinja2 import StrictUndefined, UndefinedError

from tests.conftest import ROOT, commit_all, copier, data_arguments, read_env

ASKED = ["project_name", "project_id", "generation", "topology", "zone", "model", "bucket"]


def interactive(*arguments: str | Path, answers: dict[str, str], first_words: dict[str, str]) -> list[str]:
    """Go through the questionnaire in a terminal, answering by question or with Enter alone; the
    questions that were asked, in order.
    """
    child = pexpect.spawn(
        sys.executable,
        ["-m", "copier", *map(str, arguments)],
        encoding="utf-8",
        dimensions=(60, 250),
        timeout=60,
        env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
    )
    seen = []
    names = list(first_words)
    while True:
        patterns: list[Any] = [*(re.escape(first_words[name]) for name in names), pexpect.EOF]
        index = child.expect(patterns)
        if index == len(names):
            break
        name = names.pop(index)
        seen.append(name)
        child.send(answers.get(name, "") + "\r")
    child.close()
    assert child.exitstatus == 0
    return seen


@pytest.fixture(scope="session")
def first_words(questions: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The beginning of each question's help, up to the first templated word."""
    return {name: q["help"].split("{{")[0].strip()[:30] for name, q in questions.items() if "help" in q}


def test_seven_questions_are_asked_and_enter_takes_the_tutorials_job(
    small_template: Path, tmp_path: Path, first_words: dict[str, str]
) -> None:
    seen = interactive("copy", "--trust", small_template, tmp_path / "p", answers={}, first_words=first_words)
    assert seen == ASKED
    env = read_env(tmp_path / "p" / "run.env")
    assert (env["MODEL"], env["GENERATION"], env["TOPOLOGY"]) == ("llama3-8b", "v6e", "4x4")


def test_the_topology_asked_is_one_of_the_generation_answered(
    small_template: Path, tmp_path: Path, first_words: dict[str, str]
) -> None:
    down = "\x1b[B"
    interactive(
        "copy",
        "--trust",
        small_template,
        tmp_path / "p",
        answers={"generation": down, "topology": down},
        first_words=first_words,
    )
    env = read_env(tmp_path / "p" / "run.env")
    assert (env["GENERATION"], env["TOPOLOGY"]) == ("tpu7x", "2x2x4")


def test_everything_can_be_asked_and_enter_takes_the_default(
    small_template: Path, tmp_path: Path, first_words: dict[str, str], in_process: Any
) -> None:
    seen = interactive(
        "copy", "--trust", "--ask", "*", small_template, tmp_path / "p", answers={}, first_words=first_words
    )
    # Only a reservation and a dataset have no default; neither is wanted by the others' defaults.
    assert seen == list(first_words)
    project = in_process(tmp_path / "defaults")
    for name in ("run.env", "config/train.yml"):
        assert (tmp_path / "p" / name).read_text() == (project / name).read_text()


def test_a_reservation_is_asked_for_only_when_it_is_used(
    small_template: Path, tmp_path: Path, first_words: dict[str, str]
) -> None:
    seen = interactive(
        "copy",
        "--trust",
        "--data",
        "capacity=reservation",
        small_template,
        tmp_path / "p",
        answers={"reservation": "mine"},
        first_words=first_words,
    )
    assert seen == [*ASKED, "reservation"]
    assert read_env(tmp_path / "p" / "run.env")["RESERVATION"] == "mine"


def test_defaults_need_no_terminal_and_give_the_tutorials_job(template: Path, tmp_path: Path) -> None:
    done = copier("copy", "--trust", "--defaults", template, tmp_path / "p")
    assert done.returncode == 0, done.stderr
    env = read_env(tmp_path / "p" / "run.env")
    assert (env["MODEL"], env["GENERATION"], env["TOPOLOGY"], env["NUM_SLICES"]) == ("llama3-8b", "v6e", "4x4", "1")
    assert env["UNANSWERED"] == "project_id,bucket"


def test_without_a_terminal_copier_says_how_to_answer(small_template: Path, tmp_path: Path) -> None:
    done = copier("copy", "--trust", small_template, tmp_path / "p")
    assert done.returncode == 1
    assert "--defaults" in done.stderr
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_a_generation_alone_gives_a_topology_and_zone_of_its_own(
    generation: str, in_process: Any, tmp_path: Path, questionnaire: ModuleType
) -> None:
    env = read_env(in_process(tmp_path / "p", generation=generation) / "run.env")
    record = questionnaire.facts.GENERATIONS[generation]
    assert env["TOPOLOGY"] == record["default_topology"]
    assert env["ZONE"] in record["zones"]


def test_a_changed_answer_is_found_in_the_answers_file_and_nothing_else_is_kept_there(
    template: Path, tmp_path: Path, questions: dict[str, dict[str, Any]]
) -> None:
    """No path of the machine but the template's own address, no secret, nothing derived."""
    given = {"project_id": "my-project-123", "bucket": "my-data", "steps": 7, "checkpoint_period": 7}
    done = copier("copy", "--trust", "--defaults", *data_arguments(given), template, tmp_path / "p")
    assert done.returncode == 0, done.stderr
    recorded = yaml.safe_load((tmp_path / "p" / ".copier-answers.yml").read_text())
    assert recorded.pop("_src_path") == str(template)
    assert recorded.pop("_commit") == "v99.0.0"
    assert recorded.keys() == {name for name, q in questions.items() if q.get("when") is not False}
    assert given.items() <= recorded.items()
    assert not [value for value in recorded.values() if str(value).startswith(("/", "~"))]
    assert not any(q.get("secret") for q in questions.values())


def test_messages_are_ascii_and_name_the_next_command(template: Path, tmp_path: Path) -> None:
    done = copier("copy", "--trust", "--defaults", template, tmp_path / "p")
    assert done.stderr.isascii()
    assert "make rehearse" in done.stderr
    assert "Still a placeholder: project_id,bucket" in done.stderr
    commit_all(tmp_path / "p")
    done = copier(
        "update",
        "--trust",
        "--defaults",
        "--vcs-ref=:current:",
        "--data",
        "project_id=my-project-123",
        "--data",
        "bucket=my-data",
        tmp_path / "p",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.isascii()
    assert "make rehearse" in done.stderr
    assert read_env(tmp_path / "p" / "run.env")["UNANSWERED"] == ""
    assert (ROOT / "copier.yml").read_text(encoding="utf-8").isascii()


def test_the_command_that_the_message_prints_for_placeholders_works(template: Path, tmp_path: Path) -> None:
    done = copier("copy", "--trust", "--defaults", template, tmp_path / "p")
    command = re.search(r'make reconfigure ARGS="(.*)"', done.stderr)
    assert command is not None
    commit_all(tmp_path / "p")
    words = command[1].replace("project_id=...", "project_id=my-project-123").replace("bucket=...", "bucket=my-data")
    result = subprocess.run(
        [sys.executable, "-m", "ops.template", "reconfigure", *words.split()],
        cwd=tmp_path / "p",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert read_env(tmp_path / "p" / "run.env")["BUCKET"] == "my-data"


def test_copier_yml_has_no_key_that_copier_does_not_know(questions: dict[str, dict[str, Any]]) -> None:
    """Copier ignores unknown keys, so a misspelt validator would validate nothing."""
    keys = {field.name for field in dataclasses.fields(Question)} - {
        "var_name",
        "answers",
        "context",
        "jinja_env",
        "settings",
    }
    for name, question in questions.items():
        assert question.keys() <= keys, name
    config = yaml.safe_load((ROOT / "copier.yml").read_text(encoding="utf-8"))
    known = {name for name in vars(Template) if not name.startswith("_")} | {"min_copier_version"}
    settings = {name.removeprefix("_") for name in config if name.startswith("_")}
    assert settings <= known


def test_what_the_rules_accept_is_what_the_questions_offer(
    questions: dict[str, dict[str, Any]], questionnaire: ModuleType
) -> None:
    for name, question in questions.items():
        choices = question.get("choices")
        if isinstance(choices, list):
            rule = questionnaire.rules.RULES[name]
            assert all(rule(choice, {}) == "" for choice in choices)
            assert rule("something else", {}).endswith("Choose one of: " + ", ".join(choices))


def test_every_question_says_what_it_is_and_only_seven_are_asked(questions: dict[str, dict[str, Any]]) -> None:
    assert [name for name, q in questions.items() if q.get("ask", True) is True and q.get("when") is not False] == ASKED
    for name, question in questions.items():
        assert question["type"] in ("str", "int", "json", "bool"), name
        assert "default" in question, name
        if question.get("when") is not False:
            assert question["help"], name


def test_a_name_that_no_answer_has_fails_the_render(small_template: Path, tmp_path: Path) -> None:
    source = tmp_path / "template"
    shutil.copytree(small_template, source)
    (source / "template" / "extra.txt.jinja").write_text("{{ topologie }}\n")
    with pytest.raises(UndefinedError, match="topologie"):
        run_copy(str(source), tmp_path / "p", defaults=True, quiet=True, unsafe=True)
    assert not (tmp_path / "p").exists()
    assert Template(url=str(source)).envops["undefined"] == f"jinja2.{StrictUndefined.__name__}"


def test_an_update_renders_from_the_new_tables_in_the_same_process(small_template: Path, tmp_path: Path) -> None:
    """Copier loads the old and the new version one after the other; an `import` would keep the old one."""
    source, target = tmp_path / "template", tmp_path / "p"
    shutil.copytree(small_template, source)
    commit_all(source, "v1.0.0")
    run_copy(str(source), target, defaults=True, quiet=True, unsafe=True)
    commit_all(target)
    assert read_env(target / "run.env")["HBM_GIB_PER_DEVICE"] == "31.24"

    for path, old, new in (
        ("extensions/tpu.toml", "hbm_gib_per_device = 31.24", "hbm_gib_per_device = 30"),
        ("extensions/facts.py", 'zone.rsplit("-", 1)[0]', '"new-" + zone.rsplit("-", 1)[0]'),
        ("extensions/rules.py", '"your-bucket-name"', '"another-bucket"'),
    ):
        text = (source / path).read_text()
        assert old in text
        (source / path).write_text(text.replace(old, new))
    commit_all(source, "v2.0.0")
    run_update(str(target), defaults=True, quiet=True, unsafe=True, overwrite=True)
    env = read_env(target / "run.env")
    assert env["HBM_GIB_PER_DEVICE"] == "30"
    assert env["REGION"] == "new-us-east5"
    assert env["UNANSWERED"] == "project_id"
