"""What every test of the template shares: isolation, renders, and the real copier command."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from copier import run_copy

from extensions import questionnaire as extension
from tests.control_plane import KUBERAY, KUBERAY_VERSIONS, KUEUE, KUEUE_VERSIONS, ControlPlane, build

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def _isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the developer's own git and Copier settings out of every test."""
    home = tmp_path_factory.mktemp("home")
    gitconfig = home / "gitconfig"
    gitconfig.write_text(
        "[user]\n\tname = Test\n\temail = test@example.com\n"
        "[init]\n\tdefaultBranch = main\n"
        "[core]\n\tautocrlf = false\n"
    )
    settings = home / "copier-settings.yml"
    settings.write_text("{}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CONFIG_GLOBAL", str(gitconfig))
        patch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
        patch.setenv("COPIER_SETTINGS_PATH", str(settings))
        patch.setenv("COPIER_CACHE_DIR", str(home / "copier-cache"))
        patch.setenv("PYTHONWARNINGS", "ignore")
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rehearsals first: one worker is busy with them for as long as the other takes for all the rest."""
    items.sort(key=lambda item: item.get_closest_marker("rehearsal") is None)


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return what it prints."""
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit_all(folder: Path, tag: str = "") -> None:
    """Make the folder a git repository if it is none, and commit everything in it."""
    if not (folder / ".git").exists():
        git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", tag or "commit")
    if tag:
        git(folder, "tag", tag)


@pytest.fixture(scope="session")
def template_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree as it is now, uncommitted changes included, without git: renders fastest."""
    target = tmp_path_factory.mktemp("template-files")
    for name in ("copier.yml", "extensions", "template"):
        listed = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", name)
        for path in filter(None, listed.split("\0")):
            if (ROOT / path).is_file():
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, target / path)
    return target


@pytest.fixture
def template(template_files: Path, tmp_path: Path) -> Path:
    """A git repository of the working tree with a tag above every real one, so that Copier's
    choice of the newest tag is part of what is tested. The test may change it.
    """
    target = tmp_path / "template"
    shutil.copytree(template_files, target)
    commit_all(target, "v99.0.0")
    return target


Render = Callable[..., Path]


@pytest.fixture
def render(copie: Any, template_files: Path) -> Render:
    """render(generation="v5p", ...) gives the folder of a repository with these answers."""

    def _render(**answers: Any) -> Path:
        result = copie.copy(extra_answers=answers, template_dir=template_files)
        assert result.exception is None, result.exception
        assert isinstance(result.project_dir, Path)
        return result.project_dir

    return _render


def copier(*arguments: str | Path, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the real copier command without a terminal and return what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "copier", *map(str, arguments)],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def data_arguments(answers: dict[str, Any]) -> list[str]:
    """--data NAME=VALUE for each answer."""
    return [part for name, value in answers.items() for part in ("--data", f"{name}={value}")]


def read_env(path: Path) -> dict[str, str]:
    """Read run.env: KEY=value lines, # comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="session")
def questions() -> dict[str, dict[str, Any]]:
    """The questions of copier.yml, asked, not asked and derived, in order."""
    config = yaml.safe_load((ROOT / "copier.yml").read_text(encoding="utf-8"))
    return {name: question for name, question in config.items() if not name.startswith("_")}


@pytest.fixture(scope="session")
def questionnaire() -> ModuleType:
    """The template's Jinja extension; its .facts and .rules are wired together."""
    return extension


@pytest.fixture(scope="session")
def run_python() -> Path:
    """A Python with the generated repository's lock installed (maxtext, ray): RUN_PYTHON, or the environment that every
    target of the Makefile makes before it tests.
    """
    python = Path(os.environ.get("RUN_PYTHON", ROOT / "build/venv312/bin/python"))
    if python.exists():
        return python
    pytest.skip(f"{python} is missing, a Python with the generated repository's lock: run `make demo` first")


@pytest.fixture(scope="session")
def api_server() -> Iterator[ControlPlane]:
    """A Kubernetes API server of its own with the CRDs of the newest KubeRay and Kueue; tests that use it are marked
    `cluster`. All tests share it, so each keeps to a namespace of its own.
    """
    build()
    with ControlPlane() as control_plane:
        control_plane.install(KUBERAY, KUBERAY_VERSIONS[-1])
        control_plane.install(KUEUE, KUEUE_VERSIONS[-1])
        yield control_plane


# The files whose content the questionnaire decides, without the many that it only copies.
ANSWER_FILES = ["run.env.jinja", "config/train.yml.jinja", "config/libtpu.flags.jinja"]


@pytest.fixture(scope="session")
def small_template(template_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template with run.env, config/ and the answers file alone: all that the questionnaire
    decides, rendered several times faster than the whole.
    """
    small = tmp_path_factory.mktemp("small-template")
    shutil.copytree(template_files / "extensions", small / "extensions")
    shutil.copy2(template_files / "copier.yml", small)
    for name in [*ANSWER_FILES, "{{ _copier_conf.answers_file }}.jinja"]:
        (small / "template" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(template_files / "template" / name, small / "template" / name)
    return small


@pytest.fixture(scope="session")
def in_process(small_template: Path) -> Render:
    """in_process(folder, generation="v5p", ...) renders the small template with answers given as by --data."""

    def _render(folder: Path, **answers: Any) -> Path:
        run_copy(str(small_template), folder, data=answers, defaults=True, quiet=True, unsafe=True)
        return folder

    return _render
