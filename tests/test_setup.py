"""template/setup.sh, the way into a generated repository's Python, on machines that lack one thing or another."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUP = ROOT / "template" / "setup.sh"


def executable(path: Path, text: str) -> Path:
    """Write a small program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with the system's commands, Python 3 among them, but no uv and no pyenv."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ["cat", "cmp", "cut", "dirname", "grep", "head", "mktemp", "printf", "rm", "sh", "sort"]:
        found = shutil.which(name)
        assert found
        (programs / name).symlink_to(found)
    return {"PATH": str(programs), "HOME": str(tmp_path), "UV_PYTHON_INSTALL_DIR": str(tmp_path / "pythons")}


def setup(cwd: Path, environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run setup.sh; its output is for people, so stderr holds all of it but paths."""
    return subprocess.run(
        [str(SETUP), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def old_uv(folder: Path, version: str) -> None:
    executable(folder / "uv", f'#!/bin/sh\n[ "$1" = --version ] && echo "uv {version} (abc 2020-01-01)"\n')


def test_a_uv_on_path_is_taken(tmp_path: Path, machine: dict[str, str]) -> None:
    old_uv(tmp_path / "programs", "0.10.0")
    result = setup(tmp_path, machine, "uv")
    assert result.stdout.strip() == str(tmp_path / "programs" / "uv")
    assert not (tmp_path / ".tools").exists()


def test_without_uv_and_python_the_message_says_what_to_install(tmp_path: Path, machine: dict[str, str]) -> None:
    result = setup(tmp_path, machine, "uv")
    assert result.returncode == 1
    assert result.stderr.startswith("setup: no uv and no Python 3 on PATH: install one of them")


@pytest.mark.slow
def test_an_old_uv_is_passed_over_and_a_pinned_one_installed_beside_it(tmp_path: Path) -> None:
    old_uv(tmp_path / "programs", "0.7.22")
    machine = os.environ | {"PATH": f"{tmp_path / 'programs'}:{os.environ['PATH']}"}
    result = setup(tmp_path, machine, "uv")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / ".tools/bin/uv")
    version = subprocess.run([tmp_path / ".tools/bin/uv", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.split()[1] in SETUP.read_text()
    again = setup(tmp_path, machine, "uv")
    assert (again.stdout, again.stderr) == (result.stdout, "")


def test_the_lock_is_written_with_a_uv_of_our_own_too(tmp_path: Path, machine: dict[str, str]) -> None:
    repository = tmp_path / "repository"
    (repository / "template").mkdir(parents=True)
    for name in ["setup.sh", "requirements.in"]:
        shutil.copy2(SETUP.parent / name, repository / "template")
    # Writes where it is told to; what it would resolve is not this test's concern.
    executable(
        repository / ".tools/bin/uv",
        """#!/bin/sh
[ "$1" = --version ] && { echo "uv 0.10.0"; exit; }
while [ $# -gt 0 ]; do [ "$1" = --output-file ] && echo locked >"$2"; shift; done
echo jax==1.2.3
""",
    )
    result = subprocess.run(
        [repository / "template/setup.sh", "lock"],
        cwd=repository,
        env=machine,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert (repository / "template/requirements.lock").read_text() == "locked\n"


def finds_no_python(folder: Path) -> None:
    """A new enough uv that knows no Python and may not download one."""
    executable(
        folder / "uv",
        """#!/bin/sh
case "$1 $2" in
"--version ") echo "uv 0.10.0" ;;
"venv --quiet") echo "venv: $*" ;;
*) exit 2 ;;
esac
""",
    )


def test_without_python_3_12_the_message_says_how_to_get_it(tmp_path: Path, machine: dict[str, str]) -> None:
    finds_no_python(tmp_path / "programs")
    executable(
        tmp_path / "programs/python3.12", "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2; exit 127\n"
    )
    result = setup(tmp_path, machine)
    assert result.returncode == 1
    assert "no Python 3.12. Install it (Debian, Ubuntu: apt install python3.12-venv" in result.stderr
    assert "PYTHON=/path/to/python3.12" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_pyenv_is_looked_into_when_its_shim_does_not_run(tmp_path: Path, machine: dict[str, str]) -> None:
    finds_no_python(tmp_path / "programs")
    executable(tmp_path / "programs/python3.12", "#!/bin/sh\nexit 127\n")
    python = executable(tmp_path / ".pyenv/versions/3.12.4/bin/python", "#!/bin/sh\necho 3.12\n")
    result = setup(tmp_path, machine)
    assert f"[1/3] environment .venv with {python}" in result.stderr


def test_a_named_python_of_another_version_is_refused(tmp_path: Path, machine: dict[str, str]) -> None:
    finds_no_python(tmp_path / "programs")
    python = executable(tmp_path / "python", "#!/bin/sh\necho 3.13\n")
    result = setup(tmp_path, machine | {"PYTHON": str(python)})
    assert result.returncode == 1
    assert result.stderr.strip() == f"setup: PYTHON={python} is not a working Python 3.12: name one that is"


def test_an_environment_made_from_this_lock_is_left_alone_without_looking_for_uv(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    executable(tmp_path / ".venv/bin/python", "#!/bin/sh\nexit 1\n")
    shutil.copy(ROOT / "template/requirements.lock", tmp_path / ".venv")
    assert setup(tmp_path, machine).returncode == 0


def test_an_unknown_argument_is_named(tmp_path: Path, machine: dict[str, str]) -> None:
    result = setup(tmp_path, machine, "install")
    assert result.returncode == 1
    assert result.stderr.strip() == "setup: unknown argument 'install': give none, 'uv' or 'lock'"
