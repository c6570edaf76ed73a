"""The documentation: links that lead somewhere, commands that exist, derived parts that are not stale."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import commit_all, git

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCKS = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)


def targets(makefile: Path) -> set[str]:
    """The targets that a Makefile documents."""
    return set(re.findall(r"^([a-z][a-z-]*):.*?## ", makefile.read_text(), re.MULTILINE))


def commands(text: str) -> list[str]:
    """Every command line in the code blocks of a page."""
    return [line.strip() for block in BLOCKS.findall(text) for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_the_make_targets_named_in_the_documentation_exist() -> None:
    known = targets(ROOT / "Makefile") | targets(ROOT / "template/Makefile")
    named = {
        target for page in PAGES for target in re.findall(r"(?:^|`)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE)
    }
    assert named <= known


@pytest.mark.parametrize(
    "answers", [{}, {"generation": "v5p", "num_slices": 2, "capacity": "spot"}], ids=["default", "v5p"]
)
def test_the_make_targets_named_in_a_rendered_readme_exist(render: Any, answers: dict[str, Any]) -> None:
    folder = render(**answers)
    named = re.findall(r"(?:^|`)make ([a-z][a-z-]*)", (folder / "README.md").read_text(), re.MULTILINE)
    assert set(named) <= targets(folder / "Makefile")


def test_the_answers_named_in_the_documentation_are_questions() -> None:
    questions = yaml.safe_load((ROOT / "copier.yml").read_text())
    named = {name for page in PAGES for name in re.findall(r"--data '?([a-z_]+)=", page.read_text())}
    assert named <= questions.keys()


def test_tables_and_transcript_are_not_stale() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "tools/reference.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["uvx", "pipx", "pip"])
def test_the_documented_commands_install_copier_and_render(installer: str, template: Path, tmp_path: Path) -> None:
    """Each block of the README's "Your own run", as it stands, with only the address of the template put in."""
    section = (ROOT / "README.md").read_text().partition("## Your own run")[2]
    block = next(block for block in BLOCKS.findall(section) if block.startswith(f"{installer} "))
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(template), str(clone))
    tools = tmp_path / "tools"
    subprocess.run([sys.executable, "-m", "venv", tools], check=True)
    uv = subprocess.run([ROOT / "template/setup.sh", "uv"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    environment = os.environ | {
        "PATH": f"{tools / 'bin'}:{tmp_path / 'bin'}:{(ROOT / uv.strip()).parent}:{os.environ['PATH']}",
        "PIPX_HOME": str(tmp_path / "pipx"),
        "PIPX_BIN_DIR": str(tmp_path / "bin"),
        "UV_TOOL_DIR": str(tmp_path / "uv"),
    }
    if installer == "pipx":
        subprocess.run([tools / "bin/pip", "install", "--quiet", "pipx"], check=True)

    def run(line: str, folder: Path) -> None:
        result = subprocess.run(
            ["sh", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert result.returncode == 0, f"{shlex.quote(line)}\n{result.stdout}\n{result.stderr}"

    project = tmp_path / "my-run"
    for line in block.splitlines():
        run(line.replace("--trust", "--trust --defaults --quiet"), clone)
    assert (project / "run.env").exists()
    assert yaml.safe_load((project / ".copier-answers.yml").read_text())["_src_path"] == str(template)
    if installer == "uvx":
        # And what comes later: one answer, with make and without, and the next version by hand.
        commit_all(project)
        (later,) = [line for line in commands(section) if line.startswith("make reconfigure")]
        run(later.partition("   ")[0], project)
        assert "TOPOLOGY=4x8\n" in (project / "run.env").read_text()
        git(project, "checkout", "--quiet", ".")
        pages = {
            name: commands((ROOT / f"docs/how-to/{name}.md").read_text()) for name in ("change-an-answer", "upgrade")
        }
        (by_hand,) = [line for line in pages["change-an-answer"] if line.startswith("uvx")]
        run(by_hand, project)
        assert "TOPOLOGY=4x8\n" in (project / "run.env").read_text()
        commit_all(project)
        (template / "template/added.txt").write_text("new\n")
        commit_all(template, "v99.1.0")
        (by_hand,) = [line for line in pages["upgrade"] if line.startswith("uvx")]
        run(by_hand.replace("--trust", "--trust --defaults"), project)
        assert (project / "added.txt").exists()
