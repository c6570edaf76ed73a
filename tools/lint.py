"""Run every linter and the type checker over the repository, template/ included, and sum up on one line each.

Each reads plain files where they stand; what is rendered is checked by the tests.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def tracked_files() -> list[Path]:
    """Files of the repository, new ones included, ignored ones not, relative to its root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


def is_shell_script(path: Path) -> bool:
    """True for a file that sh or bash runs, by its name or its first line."""
    if path.suffix == ".sh":
        return True
    if path.suffix:
        return False
    with (ROOT / path).open("rb") as file:
        first = file.readline()
    return first.startswith(b"#!") and first.rstrip().endswith((b"/sh", b"bash"))


def commands() -> list[tuple[str, list[str]]]:
    """The checks as (what is checked, command), in the order in which they run."""
    files = tracked_files()
    shell_scripts = [str(path) for path in files if is_shell_script(path)]
    workflows = [str(path) for path in files if path.parent.name == "workflows" and path.suffix == ".yml"]
    of_the_runs_python = ["bench/job.py", "tests/small_models_program.py", "tools/plans.py"]
    of_the_run = [str(path) for path in files if path.parts[0] == "template" and path.suffix == ".py"]
    return [
        ("ruff", ["ruff", "check", "--quiet", "."]),
        ("ruff format", ["ruff", "format", "--quiet", "--check", "."]),
        ("mypy", ["mypy"]),
        # On its own, because the template has packages of the same names (tests) and runs on another Python.
        (
            "mypy template",
            ["mypy", "--python-version", "3.12", "--cache-dir=.mypy_cache/template", *of_the_runs_python, *of_the_run],
        ),
        ("yamllint", ["yamllint", "--strict", "."]),
        ("shellcheck", ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", *shell_scripts]),
        ("hadolint", ["hadolint", "template/Dockerfile"]),
        ("workflow schema", ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows]),
        ("zizmor", ["zizmor", "--offline", "--quiet", *workflows]),
    ]


def main() -> int:
    """Exit status 0 when all checks pass; prints the output of those that do not."""
    failed = []
    for name, command in commands():
        print(f"lint: {name:<18}", end="", flush=True)
        started = time.monotonic()
        result = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=ROOT,
            env=os.environ | {"MYPYPATH": "template"} if name == "mypy template" else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        print(f"{'ok' if result.returncode == 0 else 'FAILED':<7}{time.monotonic() - started:5.1f} s", flush=True)
        if result.returncode:
            failed.append(name)
            print(result.stdout)
    if failed:
        print(f"lint: failed: {', '.join(failed)}. `make format` mends what ruff can.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
