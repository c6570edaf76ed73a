"""How long `copier copy` takes with this template, against Copier on a template of one file and one question.

Both run as a user runs them, one after the other in turn, from a git clone with a tag.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 15
AIM = 1.5


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a command without its output; an error is shown and ends the measurement."""
    environment = os.environ | {"GIT_AUTHOR_NAME": "bench", "GIT_COMMITTER_NAME": "bench"}
    environment |= {"GIT_AUTHOR_EMAIL": "bench@example.com", "GIT_COMMITTER_EMAIL": "bench@example.com"}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stderr}")


def empty_template(folder: Path) -> Path:
    """The peer: the least that is a template with an answers file."""
    (folder / "template").mkdir(parents=True)
    (folder / "copier.yml").write_text("_subdirectory: template\nname:\n  type: str\n  default: x\n")
    (folder / "template/{{ _copier_conf.answers_file }}.jinja").write_text("{{ _copier_answers | to_nice_yaml -}}\n")
    run("git", "init", "--quiet", folder)
    return folder


def this_template(folder: Path) -> Path:
    """A clone of this repository at its last commit."""
    run("git", "clone", "--quiet", ROOT, folder)
    return folder


def compare(seconds: dict[str, list[float]], aim: float) -> None:
    """Print the median of both templates and their ratio."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:<16} {medians[name]:.3f} s median of {len(values)}, {min(values):.3f} to {max(values):.3f}")
    ratio = medians["this template"] / medians["empty template"]
    print(f"ratio            {ratio:.2f} (aim: at most {aim})")


def main() -> None:
    """Print the median of each and their ratio."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        templates = {
            "empty template": empty_template(scratch / "empty"),
            "this template": this_template(scratch / "this"),
        }
        for template in templates.values():
            run("git", "add", "--all", cwd=template)
            run("git", "commit", "--quiet", "--allow-empty", "--message", "bench", cwd=template)
            run("git", "tag", "9999.0.0", cwd=template)
        seconds: dict[str, list[float]] = {name: [] for name in templates}
        for round_ in range(ROUNDS + 1):
            for name, template in templates.items():
                started = time.perf_counter()
                run(
                    sys.executable, "-m", "copier", "copy", "--trust", "--defaults", "--quiet",
                    template, scratch / f"{name} {round_}",
                )  # fmt: skip
                if round_:  # the first fills the caches of Copier and of the file system
                    seconds[name].append(time.perf_counter() - started)
    compare(seconds, AIM)


if __name__ == "__main__":
    main()
