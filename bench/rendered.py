"""A repository rendered from the default answers, for the measurements that train in one."""

import subprocess
import sys
import warnings
from pathlib import Path

from copier import run_copy

ROOT = Path(__file__).resolve().parent.parent
# Its packages: made by `make bench`, shared with the tests.
RUN_PYTHON = ROOT / "build/venv312/bin/python"
LIMIT_SECONDS = 1800


def repository(name: str) -> Path:
    """Render the default answers into build/bench/<name>, as the working tree has them now."""
    if not RUN_PYTHON.exists():
        sys.exit(f"{RUN_PYTHON} is missing: run `make bench`, which makes it")
    folder = ROOT / "build/bench" / name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_copy(str(ROOT), folder, vcs_ref="HEAD", defaults=True, unsafe=True, quiet=True, overwrite=True)
    return folder


def run(folder: Path, *arguments: str | Path) -> str:
    """Run the repository's Python in `folder` and return its output; a failure shows it and ends the measurement."""
    result = subprocess.run(
        [RUN_PYTHON, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    if result.returncode:
        sys.exit(f"{' '.join(map(str, arguments))} failed:\n{result.stdout[-4000:]}")
    return result.stdout
