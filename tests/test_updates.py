"""Repositories follow the template: real tags, real updates, owners' edits, and the make targets around them."""

import fnmatch
import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from copier import run_copy, run_update
from copier.errors import UserMessageError
from packaging.version import Version

from tests.conftest import ROOT, Render, commit_all, copier, git, read_env

CANDIDATE = "v9000.0.0"
RELEASES = sorted(git(ROOT, "tag", "--list", "v*").split(), key=Version)
ANSWERS = ".copier-answers.yml"


def edit(file: Path, old: str, new: str) -> None:
    """Replace `old`, which has to be there, once."""
    text = file.read_text()
    assert old in text, f"{file}: {old}"
    file.write_text(text.replace(old, new, 1))


def release(template: Path, tag: str, change: Callable[[Path], object] = lambda _: None) -> str:
    """Change the template and tag it."""
    change(template)
    commit_all(template, tag)
    return tag


def copy(template: Path, target: Path, tag: str, **answers: Any) -> Path:
    """A repository rendered at a tag, committed."""
    run_copy(str(template), target, data=answers, vcs_ref=tag, defaults=True, quiet=True, unsafe=True)
    commit_all(target)
    return target


def update(project: Path, tag: str, **answers: Any) -> Path:
    """Copier's own update, in this process, as the old and the new version always are."""
    run_update(str(project), data=answers, vcs_ref=tag, defaults=True, quiet=True, unsafe=True, overwrite=True)
    return project


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a repository with its content."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }


def unmerged(project: Path) -> list[str]:
    """Files that git holds to be in conflict."""
    return git(project, "diff", "--name-only", "--diff-filter=U").split()


def assert_as_fresh(project: Path, template: Path, tag: str, folder: Path) -> None:
    """The repository is, byte for byte, what the same answers render today, but for what is the owner's alone."""
    assert unmerged(project) == []
    recorded = yaml.safe_load((project / ANSWERS).read_text())
    answers = {name: value for name, value in recorded.items() if not name.startswith("_")}
    owned = yaml.safe_load((template / "copier.yml").read_text())["_skip_if_exists"]
    fresh = files(copy(template, folder, tag, **answers))
    ours = files(project)
    assert ours.keys() == fresh.keys()
    assert [name for name in ours if ours[name] != fresh[name] and name not in owned] == []


# --- From every release to this version ----------------------------------------------------------


@pytest.fixture(scope="module")
def released(template_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this repository with its releases, and the working tree on top as the candidate."""
    clone = tmp_path_factory.mktemp("released") / "template"
    git(ROOT, "clone", "--quiet", str(ROOT), str(clone))
    for name in ("copier.yml", "extensions", "template"):
        path = clone / name
        if path.is_dir():
            shutil.rmtree(path)
    shutil.copytree(template_files, clone, dirs_exist_ok=True)
    commit_all(clone, CANDIDATE)
    return clone


@pytest.mark.skipif(not RELEASES, reason="no release is tagged yet, or the clone has no tags (git fetch --tags)")
@pytest.mark.parametrize("tag", RELEASES)
def test_an_untouched_repository_of_a_release_becomes_what_is_rendered_today(
    tag: str, released: Path, tmp_path: Path
) -> None:
    answers = {"generation": "v5p", "num_slices": 2, "steps": 7, "checkpoint_period": 5}
    project = update(copy(released, tmp_path / "p", tag, **answers), CANDIDATE)
    assert_as_fresh(project, released, CANDIDATE, tmp_path / "fresh")
    recorded = yaml.safe_load((project / ANSWERS).read_text())
    assert recorded["_commit"] == CANDIDATE
    assert answers.items() <= recorded.items()


def test_the_versions_of_the_releases_and_the_changelog_agree() -> None:
    """Copier orders tags by PEP 440 and ignores others, so a tag of another form would never reach anybody."""
    tags = git(ROOT, "tag").split()
    assert tags == [tag for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+(rc\d+)?", tag)]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = [heading for heading in headings if heading != "Unreleased"]
    assert versions == [str(v) for v in sorted(map(Version, versions), reverse=True)]
    assert {tag.removeprefix("v") for tag in RELEASES if "rc" not in tag} <= set(versions)
    project = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None
    assert project[1] == versions[0]


# --- A change of data reaches old repositories ---------------------------------------------------


@pytest.fixture
def history(small_template: Path, tmp_path: Path) -> Path:
    """A git repository of the questionnaire's template, tagged v9001.0.0, for further versions."""
    template = tmp_path / "template"
    shutil.copytree(small_template, template)
    release(template, "v9001.0.0")
    return template


def test_a_new_topology_can_be_chosen_after_an_update(history: Path, tmp_path: Path) -> None:
    table = history / "extensions/tpu.toml"
    today = table.read_text()
    before = release(history, "v9002.0.0", lambda _: drop_topology(table))
    project = copy(history, tmp_path / "p", before)
    with pytest.raises(UserMessageError, match="'4x8' is not offered for v6e"):
        update(project, before, topology="4x8")
    tag = release(history, "v9003.0.0", lambda _: restore(table, today))
    update(project, tag)
    commit_all(project)
    assert read_env(project / "run.env")["TOPOLOGY"] == "4x4"
    update(project, tag, topology="4x8")
    assert read_env(project / "run.env")["HOSTS_PER_SLICE"] == "8"
    assert_as_fresh(project, history, tag, tmp_path / "fresh")


def drop_topology(table: Path) -> None:
    """Offer 4x8 no longer."""
    restore(table, table.read_text().replace('"4x8", ', ""))


def restore(file: Path, text: str) -> None:
    """Write a file that has another content now."""
    assert file.read_text() != text
    file.write_text(text)


def test_a_topology_that_is_no_longer_offered_gives_way_to_the_default_and_make_update_says_so(
    versions: "Versions", tmp_path: Path
) -> None:
    template = Path(shutil.copytree(versions.template, tmp_path / "template"))
    project = copy(template, tmp_path / "p", versions.new, topology="4x8")
    release(template, "v9003.0.0", lambda t: drop_topology(t / "extensions/tpu.toml"))
    done = tool(project, "update", "--no-check")
    assert done.returncode == 0, done.stderr
    assert "  topology: 4x8 -> 4x4 (not given" in done.stdout
    assert "on 16 devices instead of 32" in done.stdout


def test_a_corrected_machine_type_reaches_the_repository(history: Path, tmp_path: Path) -> None:
    project = copy(history, tmp_path / "p", "v9001.0.0")
    tag = release(history, "v9002.0.0", correct_machine)
    update(project, tag)
    assert read_env(project / "run.env")["MACHINE_TYPE"] == "ct6e-corrected-4t"
    assert_as_fresh(project, history, tag, tmp_path / "fresh")


def correct_machine(template: Path) -> None:
    """Another name for the machine of a v6e host with four chips."""
    table = template / "extensions/tpu.toml"
    text = table.read_text()
    assert "ct6e-standard-4t" in text
    table.write_text(text.replace("ct6e-standard-4t", "ct6e-corrected-4t"))


def test_a_renamed_question_keeps_its_answer_without_a_migration(history: Path, tmp_path: Path) -> None:
    """The way that CONTRIBUTING.md prescribes: the new question's default reads the old name."""
    project = copy(history, tmp_path / "p", "v9001.0.0", max_failures=9)
    untouched = copy(history, tmp_path / "untouched", "v9001.0.0")
    tag = release(history, "v9002.0.0", rename_question)
    update(project, tag)
    recorded = yaml.safe_load((project / ANSWERS).read_text())
    assert recorded["restarts"] == 9
    assert "max_failures" not in recorded
    assert read_env(project / "run.env")["MAX_FAILURES"] == "9"
    assert_as_fresh(project, history, tag, tmp_path / "fresh")
    commit_all(project)
    update(project, tag)  # a second time: there is nothing left to carry over
    assert git(project, "status", "--porcelain") == ""
    assert read_env(update(untouched, tag) / "run.env")["MAX_FAILURES"] == "3"


def rename_question(template: Path) -> None:
    """Call max_failures restarts from now on."""
    for name in ("copier.yml", "extensions/rules.py", "template/run.env.jinja"):
        path = template / name
        path.write_text(path.read_text().replace("max_failures", "restarts"))
    config = template / "copier.yml"
    default = '  default: "{{ max_failures if max_failures is defined else 3 }}"\n'
    question = re.compile(r"(\nrestarts:\n(?:  .*\n)*?)  default: 3\n")
    config.write_text(question.sub(lambda match: match[1] + default, config.read_text()))
    assert default in config.read_text()


def test_a_removed_question_leaves_no_trace_and_keeps_the_other_answers(history: Path, tmp_path: Path) -> None:
    project = copy(history, tmp_path / "p", "v9001.0.0", max_failures=9, steps=77)
    tag = release(history, "v9002.0.0", remove_question)
    update(project, tag)
    recorded = yaml.safe_load((project / ANSWERS).read_text())
    assert "max_failures" not in recorded
    assert recorded["steps"] == 77
    assert "MAX_FAILURES" not in read_env(project / "run.env")
    assert_as_fresh(project, history, tag, tmp_path / "fresh")


def remove_question(template: Path) -> None:
    """No max_failures any more."""
    config = template / "copier.yml"
    config.write_text(re.sub(r"\nmax_failures:\n(  .*\n)+", "\n", config.read_text()))
    edit(template / "template/run.env.jinja", "MAX_FAILURES={{ max_failures }}\n", "")
    edit(template / "extensions/rules.py", "        max_failures,\n", "")


def test_a_new_question_takes_a_default_that_changes_nothing(history: Path, tmp_path: Path) -> None:
    project = copy(history, tmp_path / "p", "v9001.0.0")
    before = files(project)
    tag = release(history, "v9002.0.0", add_question)
    after = files(update(project, tag))
    assert yaml.safe_load(after.pop(ANSWERS))["shade"] == "plain"
    before.pop(ANSWERS)
    assert after == before


def add_question(template: Path) -> None:
    """One more that is not asked; its default renders what was there before."""
    edit(
        template / "copier.yml",
        "# --- Derived",
        "shade:\n  type: str\n  choices: [plain, deep]\n  default: plain\n  ask: false\n\n# --- Derived",
    )
    edit(
        template / "template/run.env.jinja", "# Names\n", "# Names\n{% if shade == 'deep' %}\nSHADE=deep\n{% endif %}\n"
    )


# --- A change of files reaches old repositories, and owners' edits stay ---------------------------


@dataclass(frozen=True)
class Versions:
    """The whole template at two tags, and a repository of the first that nobody has touched."""

    template: Path
    old: str
    new: str
    project: Path


def next_version(template: Path) -> None:
    """What a release brings: pins, fixes in code, manifests and texts, a file renamed, removed and added."""
    source = template / "template"
    for name, package in (("requirements.in", "maxtext"), ("requirements.in", "ray"), ("requirements.lock", "maxtext")):
        text = (source / name).read_text()
        restore(source / name, re.sub(rf"^({package}[^=\s]*)==\S+", r"\1==9.9.9", text, flags=re.MULTILINE))
    edit(source / "train.py", "import ", "# A fix that every run needs.\nimport ")
    edit(source / "k8s/cluster/raycluster.yaml.jinja", "rayVersion:", "# A fix in the manifest.\n  rayVersion:")
    edit(source / "config/train.yml.jinja", "async_checkpointing: true", "async_checkpointing: false")
    edit(source / "README.md.jinja", "## Commands\n", "## Commands\n\nA new sentence.\n")
    edit(source / "infra/bucket-lifecycle.json", "{", "{ ")
    (source / "ops/before.py").rename(source / "ops/after.py")
    (source / "ops/obsolete.py").unlink()
    (source / "ops/added.py").write_text('"""New."""\n')
    (source / "notes.md").write_text("The template's notes.\n")


@pytest.fixture(scope="module")
def versions(template_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Two whole versions; the repositories are copies of one render, since each takes a second."""
    folder = tmp_path_factory.mktemp("versions")
    template = folder / "template"
    shutil.copytree(template_files, template)
    for name in ("before", "obsolete"):
        (template / f"template/ops/{name}.py").write_text(f'"""To be {name}."""\n\nVALUE = 1\n')
    old = release(template, "v9001.0.0")
    project = copy(template, folder / "project", old)
    return Versions(template, old, release(template, "v9002.0.0", next_version), project)


@pytest.fixture
def project(versions: Versions, tmp_path: Path) -> Path:
    """An untouched repository of the old version."""
    return Path(shutil.copytree(versions.project, tmp_path / "project"))


def test_pins_renamed_removed_and_added_files_reach_an_untouched_repository(
    versions: Versions, project: Path, tmp_path: Path
) -> None:
    update(project, versions.new)
    assert_as_fresh(project, versions.template, versions.new, tmp_path / "fresh")
    assert "==9.9.9" in (project / "requirements.in").read_text()
    assert "==9.9.9" in (project / "requirements.lock").read_text()
    assert not (project / "ops/before.py").exists()
    assert not (project / "ops/obsolete.py").exists()
    assert (project / "ops/after.py").exists()
    assert (project / "ops/added.py").exists()


def tool(project: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """`make update`, `reconfigure` or `drift` without make: in the Copier of this environment."""
    return subprocess.run(
        [sys.executable, "-m", "ops.template", *arguments],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


# (file, what is there, what the owner makes of it): lines that the next version leaves alone.
EDITS = [
    ("config/train.yml", "steps: 100\n", "steps: 123\nlearning_rate: 1.0e-4\n"),
    ("k8s/cluster/raycluster.yaml", 'cpu: "', 'cpu: "1'),
    ("train.py", "def main(", "# The owner's note.\ndef main("),
    ("README.md", "## In the cloud\n", "## Our team\n\nAsk Ada.\n\n## In the cloud\n"),
    ("Dockerfile", "\nFROM ", "\n# Ours.\nFROM "),
    ("infra/bucket-lifecycle.json", "{", "{\n"),
    (".gitignore", "/build/\n", "/build/\n/notebooks/\n"),
    ("requirements.in", "", "einops==0.8.1\n"),
]


def edited(project: Path) -> None:
    """What owners do in their first week."""
    for name, old, new in EDITS:
        if old:
            edit(project / name, old, new)
        else:
            with (project / name).open("a") as file:
                file.write(new)
    (project / "src").mkdir()
    (project / "src/loss.py").write_text("LOSS = 1\n")
    (project / "k8s/extra.yaml").write_text("kind: ConfigMap\n")
    (project / "local.mk").write_text("hello: ## Greet\n\t@echo hello\n")
    (project / "cloudbuild.yaml").unlink()
    (project / "ops/template-notes.md").write_text("mine\n")
    commit_all(project)


def test_what_owners_edit_add_and_delete_survives_an_update(versions: Versions, project: Path) -> None:
    edited(project)
    before = files(project)
    done = tool(project, "update", "--no-check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert unmerged(project) == []
    after = files(project)
    for name, _, new in EDITS:
        assert new.encode() in after[name], name
    assert after["infra/bucket-lifecycle.json"] == before["infra/bucket-lifecycle.json"]
    for name in ("src/loss.py", "k8s/extra.yaml", "local.mk", "ops/template-notes.md"):
        assert after[name] == before[name]
    assert "cloudbuild.yaml" not in after
    # ... and the template's side has arrived as well.
    assert b"A fix that every run needs" in after["train.py"]
    assert b"A fix in the manifest" in after["k8s/cluster/raycluster.yaml"]
    assert b"async_checkpointing: false" in after["config/train.yml"]
    assert b"==9.9.9" in after["requirements.in"]
    assert yaml.safe_load(after[ANSWERS])["_commit"] == versions.new
    assert "v9001.0.0 -> v9002.0.0" in done.stdout


def test_the_same_line_changed_by_both_is_a_conflict_that_nobody_can_miss(project: Path) -> None:
    edit(project / "config/train.yml", "async_checkpointing: true", "async_checkpointing: mine")
    commit_all(project)
    before = files(project)
    done = tool(project, "update")
    assert done.returncode == 1
    assert unmerged(project) == ["config/train.yml"]
    text = (project / "config/train.yml").read_text()
    assert "<<<<<<< before updating\nasync_checkpointing: mine\n" in text
    assert "async_checkpointing: false\n>>>>>>> after updating\n" in text
    assert re.search(r"Conflicts,.*\n  config/train.yml\n", done.stdout)
    assert "make check" in done.stdout
    # git itself knows the three sides, so that its merge tools work.
    assert "mine" in git(project, "show", ":2:config/train.yml")
    assert "async_checkpointing: true" in git(project, "show", ":1:config/train.yml")
    assert "async_checkpointing: false" in git(project, "show", ":3:config/train.yml")
    undo = re.search(r"To undo all of it: (.*)", done.stdout)
    assert undo is not None
    subprocess.run(["sh", "-c", undo[1]], cwd=project, check=True)
    assert git(project, "status", "--porcelain") == ""
    assert files(project) == before


def test_an_edited_file_that_the_template_drops_or_renames_is_kept_and_named(project: Path) -> None:
    for name in ("ops/before.py", "ops/obsolete.py"):
        edit(project / name, '"""', '"""Mine. ')
    (project / "notes.md").write_text("The owner's notes, of a name that the template takes as well.\n")
    commit_all(project)
    done = tool(project, "update", "--no-check")
    for name in ("ops/before.py", "ops/obsolete.py"):
        assert (project / name).read_text().startswith('"""Mine. ')
        assert f"  {name}\n" in done.stdout
    assert (project / "ops/after.py").exists()
    assert "The owner's notes" in (project / "notes.md").read_text()
    # The same name on both sides is a conflict, or nothing is lost of either.
    assert done.returncode == bool(unmerged(project))
    assert unmerged(project) == ["notes.md"] or "The template's notes" not in (project / "notes.md").read_text()


def test_an_update_wants_a_clean_tree_and_a_dry_run_changes_nothing(project: Path) -> None:
    before = files(project)
    done = tool(project, "update", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "ops/added.py" in done.stdout
    assert files(project) == before
    assert git(project, "status", "--porcelain") == ""
    (project / "new.txt").write_text("not committed\n")
    done = tool(project, "update")
    assert done.returncode == 1
    assert "new.txt" in done.stderr
    assert "Commit or stash" in done.stderr
    assert files(project) == before | {"new.txt": b"not committed\n"}


def test_messages_for_a_repository_that_cannot_be_updated(project: Path, tmp_path: Path) -> None:
    shutil.rmtree(project / ".git")
    git(project, "init", "--quiet")
    assert "nothing is committed here yet" in tool(project, "update").stderr
    commit_all(project)
    edit(project / ANSWERS, "_src_path: ", f"_src_path: {tmp_path}/gone # ")
    commit_all(project)
    for command in (["update"], ["reconfigure", "steps=5"], ["drift"]):
        done = tool(project, *command)
        assert done.returncode == 1, command
        assert done.stderr.startswith("error: "), command
        assert "gone" in done.stderr, command
        assert "Traceback" not in done.stderr
    (project / ANSWERS).unlink()
    assert "bring it back from git" in tool(project, "drift").stderr


# --- Another answer ------------------------------------------------------------------------------


def test_reconfigure_changes_everything_that_follows_and_says_what_to_redo(
    versions: Versions, project: Path, tmp_path: Path
) -> None:
    batch = yaml.safe_load((project / "config/train.yml").read_text())["per_device_batch_size"]
    done = tool(project, "reconfigure", "generation=v5p", "steps=10")
    assert done.returncode == 0, done.stderr
    env = read_env(project / "run.env")
    assert (env["GENERATION"], env["TOPOLOGY"], env["HOSTS_PER_SLICE"]) == ("v5p", "2x2x2", "2")
    recorded = yaml.safe_load((project / ANSWERS).read_text())
    # Defaults that nobody chose follow: a zone that has v5p, a checkpoint within the steps. The version does not.
    assert recorded["zone"] == "us-east5-a"
    assert recorded["checkpoint_period"] == 10
    assert recorded["_commit"] == versions.old
    assert_as_fresh(project, versions.template, versions.old, tmp_path / "fresh")
    for said in (
        "\n-GENERATION=v6e\n",
        "\n+GENERATION=v5p\n",
        "  topology: 4x4 -> 2x2x2 (not given",
        "node pools: make infra",
        "--cluster=my-tpu-run --location=us-east5-b",
        "image: its content changed",
        "RayCluster and RayJob",
        "on 8 devices instead of 16",
        f"8 sequences instead of {16 * batch}",
    ):
        assert said in done.stdout, said
    assert "Grain" not in done.stdout


def test_reconfigure_refuses_with_the_questionnaires_own_words_and_touches_nothing(project: Path) -> None:
    for words, said in (
        (["topology=3x3"], "topology: '3x3' is not offered for v6e. Choose one of: 1x1"),
        (["topology=2x2", "num_slices=2"], "num_slices: "),
        (["capacity=reservation"], "Give also reservation=..."),
        (["topologi=4x8"], "Did you mean topology?"),
        (["_commit=v1"], "there is no answer '_commit'"),
        (["4x8"], "'4x8' is not NAME=VALUE"),
        ([], "which answer?"),
    ):
        done = tool(project, "reconfigure", *words)
        assert done.returncode == 1, words
        assert said in done.stderr, words
        assert "Traceback" not in done.stderr
    assert git(project, "status", "--porcelain") == ""


def test_reconfigure_keeps_chosen_answers_and_owners_edits(project: Path) -> None:
    edit(project / "config/train.yml", "hardware: tpu\n", "hardware: tpu\nlearning_rate: 1.0e-4\n")
    commit_all(project)
    assert tool(project, "reconfigure", "zone=us-east1-d", "topology=4x8").returncode == 0
    commit_all(project)
    # A chosen zone stays also where its default would move; a topology that was chosen and does not exist is refused.
    done = tool(project, "reconfigure", "generation=v5p")
    assert done.returncode == 1
    assert "topology: '4x8' is not offered for v5p" in done.stderr
    done = tool(project, "reconfigure", "generation=v5p", "topology=2x2x2")
    assert done.returncode == 0, done.stderr
    assert read_env(project / "run.env")["ZONE"] == "us-east1-d"
    assert "learning_rate: 1.0e-4" in (project / "config/train.yml").read_text()


# --- How far a repository has moved, and whose its files are --------------------------------------


def test_drift_says_what_was_changed_by_whose_file_it_is(project: Path) -> None:
    done = tool(project, "drift")
    assert done.returncode == 0, done.stderr
    assert re.search(r"Yours, added here: 0; identical: \d\d files", done.stdout)
    edited(project)
    edit(project / "ops/before.py", '"""', '"""Mine. ')
    done = tool(project, "drift", "--diff")
    template, _, rest = done.stdout.partition("Shared, changed here")
    shared, _, yours = rest.partition("Yours, changed here")
    assert re.search(r"ops/before.py +\+1 -1", template)
    assert re.search(r"cloudbuild.yaml +deleted", template)
    assert re.search(r"config/train.yml +\+2 -1", shared)
    assert "infra/bucket-lifecycle.json" in yours
    assert "Yours, added here: 4" in yours
    assert "+LOSS" not in done.stdout
    assert "+learning_rate: 1.0e-4" in done.stdout


def test_every_file_has_exactly_one_owner_and_every_entry_a_file(render: Render, questions: dict[str, Any]) -> None:
    ownership = questions["ownership"]["default"]
    assert list(ownership) == ["owner", "shared", "template"]
    config = yaml.safe_load((ROOT / "copier.yml").read_text())
    assert config["_skip_if_exists"] == ownership["owner"]
    rendered = files(render())
    used = set()
    for name in rendered:
        owners = [
            (owner, entry)
            for owner, entries in ownership.items()
            for entry in entries
            if fnmatch.fnmatchcase(name, f"{entry}*" if entry.endswith("/") else entry)
        ]
        assert len(owners) == 1, f"{name} belongs to {owners or 'nobody'}: see `ownership` in copier.yml"
        used.update(owners)
    assert used == {(owner, entry) for owner, entries in ownership.items() for entry in entries}
    readme = rendered["README.md"].decode()
    for entries in ownership.values():
        assert all(f"`{entry}`" in readme for entry in entries)


def test_every_entry_of_the_ownership_has_its_reason_beside_it() -> None:
    block = (ROOT / "copier.yml").read_text().partition("_skip_if_exists")[2].partition("# --- Messages")[0]
    entries = [line for line in block.splitlines() if line.strip().startswith("- ")]
    assert len(entries) > 15
    assert all(re.search(r"\S # \S.{10,}", line) for line in entries), entries


# --- Where a template comes from ------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(versions: Versions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two versions as a bare repository, such as a server has."""
    target = tmp_path_factory.mktemp("bare") / "template.git"
    git(versions.template, "clone", "--quiet", "--bare", str(versions.template), str(target))
    git(target, "update-server-info")
    return target


def test_a_git_address_gives_the_newest_tag_and_takes_updates(bare: Path, versions: Versions, tmp_path: Path) -> None:
    address = f"file://{bare}"
    done = copier("copy", "--trust", "--defaults", "--vcs-ref", versions.old, address, tmp_path / "p")
    assert done.returncode == 0, done.stderr
    commit_all(tmp_path / "p")
    done = copier("update", "--trust", "--defaults", tmp_path / "p")
    assert done.returncode == 0, done.stderr
    recorded = yaml.safe_load((tmp_path / "p" / ANSWERS).read_text())
    assert (recorded["_src_path"], recorded["_commit"]) == (address, versions.new)
    assert "folder of this machine" not in done.stderr


def test_a_token_in_the_address_is_never_recorded(bare: Path, tmp_path: Path) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(bare.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}/template.git"
        for number, user in enumerate(("ada:s3cret@", "s3cret@", "")):
            target = tmp_path / str(number)
            done = copier("copy", "--trust", "--defaults", f"http://{user}{host}", target)
            assert done.returncode == 0, done.stderr
            text = (target / ANSWERS).read_text()
            assert "s3cret" not in text
            assert yaml.safe_load(text)["_src_path"] == f"http://{host}"
        server.shutdown()


def test_a_local_clone_with_uncommitted_changes_renders_them_and_says_that_it_is_local(
    versions: Versions, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(versions.template), str(clone))
    edit(clone / "template/train.py", "import ", "# Not committed.\nimport ")
    done = copier("copy", "--trust", "--defaults", clone, tmp_path / "tagged")
    assert "# Not committed." not in (tmp_path / "tagged/train.py").read_text()
    done = copier("copy", "--trust", "--defaults", "--vcs-ref", "HEAD", clone, tmp_path / "head")
    assert done.returncode == 0, done.stderr
    assert "# Not committed." in (tmp_path / "head/train.py").read_text()
    assert "the template is a folder of this machine" in done.stderr


def test_without_trust_or_the_extension_the_message_says_what_to_do(versions: Versions, tmp_path: Path) -> None:
    done = copier("copy", "--defaults", versions.template, tmp_path / "p")
    assert done.returncode == 4
    assert "--trust" in done.stderr
    assert not (tmp_path / "p").exists()
    blocked = (
        "import sys; sys.modules['copier_template_extensions'] = None; from copier import cli; cli.CopierApp.run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", blocked, "copy", "--trust", "--defaults", str(versions.template), str(tmp_path / "p")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "copier_template_extensions" in done.stderr
    assert "alongside Copier" in done.stderr
    readme = (ROOT / "README.md").read_text()
    assert "Copier needs `copier-template-extensions` beside it, and `--trust`" in " ".join(readme.split())


# --- As people run it ----------------------------------------------------------------------------


def uv() -> Path:
    """The uv that setup.sh finds or installs."""
    found = subprocess.run([ROOT / "template/setup.sh", "uv"], cwd=ROOT, capture_output=True, text=True, check=True)
    return ROOT / found.stdout.strip()


def with_uv(project: Path, command: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a command in a generated repository, with uv on PATH."""
    return subprocess.run(
        command,
        cwd=project,
        env=os.environ | {"PATH": f"{uv().parent}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def make(project: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run make in a generated repository, with uv on PATH."""
    return with_uv(project, ["make", "--no-print-directory", *arguments], environment)


@pytest.fixture
def locked_venv(run_python: Path) -> str:
    """An environment that `make check` takes as it is: made by setup.sh from the lock of today."""
    venv = run_python.parent.parent
    made_from = venv / "requirements.lock"
    if not made_from.exists() or made_from.read_bytes() != (ROOT / "template/requirements.lock").read_bytes():
        pytest.skip(f"{venv} was not made by setup.sh from this lock, so that make check would change it")
    return str(venv)


@pytest.mark.slow
def test_make_update_brings_its_own_copier_and_runs_the_repositorys_checks(
    template_files: Path, tmp_path: Path, locked_venv: str
) -> None:
    template = tmp_path / "template"
    shutil.copytree(template_files, template)
    project = copy(template, tmp_path / "p", release(template, "v9001.0.0"))
    release(template, "v9002.0.0", lambda t: edit(t / "template/Makefile", "help:", "# New.\nhelp:"))
    venv = {"VENV": locked_venv}
    done = make(project, "update", **venv)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "# New." in (project / "Makefile").read_text()
    commit_all(project)
    done = make(project, "update")
    assert done.returncode == 0, done.stderr
    assert "v9002.0.0 is the newest version" in done.stdout
    done = make(project, "drift")
    assert done.returncode == 0, done.stderr
    # A check that fails ends the update with an error, also through make.
    release(template, "v9003.0.0", lambda t: (t / "template/wrong.py").write_text("import  os\n"))
    done = make(project, "update", **venv)
    assert done.returncode != 0
    assert "make check fails" in done.stdout


def run_step(job: str, step: str, project: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the script of one step of the generated repository's template workflow as GitHub's runner does."""
    workflow = yaml.safe_load((ROOT / "template/.github/workflows/template.yml").read_text())
    (script,) = [one["run"] for one in workflow["jobs"][job]["steps"] if one.get("id") == step]
    return with_uv(project, ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script], environment)


@pytest.mark.slow
def test_the_workflow_proposes_a_new_version_once_and_only_when_it_passes(
    template_files: Path, tmp_path: Path, locked_venv: str
) -> None:
    """Its two scripts for real, git included. Of gh, which needs GitHub, a stand-in that writes down its arguments."""
    template = Path(shutil.copytree(template_files, tmp_path / "template"))
    project = copy(template, tmp_path / "p", release(template, "v9001.0.0"))
    git(tmp_path, "clone", "--quiet", "--bare", str(project), str(tmp_path / "origin.git"))
    git(project, "remote", "add", "origin", str(tmp_path / "origin.git"))
    runner = tmp_path / "runner"
    (runner / "bin").mkdir(parents=True)
    (runner / "bin/gh").write_text(f'#!/bin/sh\necho "$@" >>{runner}/gh.txt\n')
    (runner / "bin/gh").chmod(0o755)
    variables = {
        "RUNNER_TEMP": str(runner),
        "GITHUB_OUTPUT": str(runner / "output"),
        "VENV": locked_venv,
    }

    done = run_step("update", "update", project, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (runner / "output").exists()  # nothing newer: the other job does not start

    release(template, "v9002.0.0", lambda t: edit(t / "template/Makefile", "help:", "# New.\nhelp:"))
    done = run_step("update", "update", project, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (runner / "output").read_text() == "version=v9002.0.0\n"

    variables |= {"VERSION": "v9002.0.0", "GH_TOKEN": "none", "PATH": f"{runner / 'bin'}:{os.environ['PATH']}"}
    for _ in range(2):
        checkout = tmp_path / "checkout"
        shutil.rmtree(checkout, ignore_errors=True)
        git(tmp_path, "clone", "--quiet", str(tmp_path / "origin.git"), str(checkout))
        done = run_step("propose", "propose", checkout, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "proposed already" in done.stdout
    assert "# New." in git(tmp_path / "origin.git", "show", "template-v9002.0.0:Makefile")
    calls = (runner / "gh.txt").read_text().splitlines()
    assert [call.split()[0:2] for call in calls] == [["auth", "setup-git"], ["pr", "create"], ["auth", "setup-git"]]
    assert "--title Template v9002.0.0" in calls[1]
    assert "v9001.0.0 -> v9002.0.0" in (runner / "body.md").read_text()

    # A conflict ends the first job, so nothing is proposed.
    git(project, "reset", "--quiet", "--hard")
    edit(project / "Makefile", "help:", "# Mine.\nhelp:")
    commit_all(project)
    (runner / "output").unlink()
    done = run_step("update", "update", project, **variables)
    assert done.returncode != 0
    assert "Conflicts" in done.stdout
    assert not (runner / "output").exists()


def test_the_job_of_the_workflow_that_may_write_runs_nothing_of_the_template() -> None:
    jobs = yaml.safe_load((ROOT / "template/.github/workflows/template.yml").read_text())["jobs"]
    assert jobs["update"]["permissions"] == {"contents": "read"}
    (script,) = [step["run"] for step in jobs["propose"]["steps"] if "run" in step]
    assert set(re.findall(r"^\s*(?:if |\{ )?(\w+)", script, re.MULTILINE)) <= {
        *("gh", "git", "branch", "echo", "exit", "fi", "commit", "printf", "TEMPLATE_TOKEN", "Workflow"),
    }
    for job in jobs.values():
        for step in job["steps"]:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step.get("uses", "a@" + "0" * 40))


def test_a_target_in_local_mk_is_listed_and_runs(project: Path) -> None:
    (project / "local.mk").write_text("hello: ## Greet\n\t@echo hello\n")
    assert "Greet" in make(project, "help").stdout
    assert make(project, "hello").stdout == "hello\n"


def test_the_copier_of_the_makefile_is_the_one_that_is_tested_here() -> None:
    pin = re.search(r'"(copier==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert pin is not None
    makefile = (ROOT / "template/Makefile").read_text()
    assert f"COPIER ?= {pin[1]}\n" in makefile
    locked = re.search(r'name = "copier-template-extensions"\nversion = "([^"]+)"', (ROOT / "uv.lock").read_text())
    assert locked is not None
    assert f"copier-template-extensions=={locked[1]} " in makefile


def python(version: str) -> Path:
    """A Python of this version that is here already."""
    found = subprocess.run(
        [uv(), "python", "find", "--no-python-downloads", "--system", version],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    candidates = [found, *map(str, (Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))]
    for candidate in filter(None, candidates):
        return Path(candidate)
    pytest.skip(f"no Python {version} here")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_questionnaire_gives_the_same_on_every_supported_python(
    version: str, small_template: Path, in_process: Render, tmp_path: Path
) -> None:
    packages = re.search(r"--from '\$\(COPIER\)'.*?--with (\S+)", (ROOT / "template/Makefile").read_text(), re.DOTALL)
    pin = re.search(r"^COPIER \?= (\S+)", (ROOT / "template/Makefile").read_text(), re.MULTILINE)
    assert packages is not None
    assert pin is not None
    command = ["copier", "copy", "--trust", "--defaults", "--quiet", "--data=generation=v5p", "--data=num_slices=2"]
    run = [uv(), "tool", "run", "--quiet", "--python", python(version), "--from", pin[1], "--with", packages[1]]
    done = subprocess.run(
        [*run, *command, small_template, tmp_path / "p"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    expected = in_process(tmp_path / "expected", generation="v5p", num_slices=2)
    assert files(tmp_path / "p") == files(expected)
