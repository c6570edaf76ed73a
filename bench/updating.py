"""How long `copier update` takes with this template, against Copier on a template of one file and one question, and how
many conflicts it leaves over realistic edits.

Both are updated as a user does, in turn, from a git clone with two tags between which one line of the template changes.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rendering import compare, empty_template, run, this_template

ROUNDS = 5
AIM = 2.5

# What owners do, each on its own: (file, text there or "" for its end, text instead). The update that follows changes a
# line of each of these files, next to none of them; the last one changes the very line that the update changes.
EDITS = [
    ("config/train.yml", "steps: 100\n", "steps: 5000\n"),
    ("config/train.yml", "", "learning_rate: 1.0e-4\n"),
    ("k8s/cluster/raycluster.yaml", "rayVersion:", "# Checked by the platform team.\n  rayVersion:"),
    ("train.py", "def main(", "# Our loop.\ndef main("),
    ("train.py", "", "# The end.\n"),
    ("README.md", "## In the cloud\n", "## Our team\n\nAsk Ada.\n\n## In the cloud\n"),
    ("requirements.in", "", "einops==0.8.1\n"),
    ("Dockerfile", "", "# Ours.\n"),
    ("Makefile", "", "\nours:\n\t@echo ours\n"),
    (".gitignore", "", "/notebooks/\n"),
    ("infra/bucket-lifecycle.json", "{", "{ "),
    ("own/loss.py", "", "LOSS = 1\n"),
    ("config/train.yml", "async_checkpointing: true", "async_checkpointing: mine"),
]
BOTH_CHANGED = 1  # of EDITS
# What the update changes in them, at the top of each but for the last.
CHANGES = [
    "config/train.yml.jinja",
    "k8s/cluster/raycluster.yaml.jinja",
    "train.py",
    "README.md.jinja",
    "requirements.in",
    "Dockerfile",
    "Makefile",
    ".gitignore",
]


def copier(*arguments: str | Path) -> float:
    """Run Copier and return how many seconds it took."""
    started = time.perf_counter()
    run(sys.executable, "-m", "copier", *arguments)
    return time.perf_counter() - started


def commit(folder: Path, *tag: str) -> None:
    """Commit everything, as a repository of its own, and tag it."""
    run("git", "init", "--quiet", folder)
    run("git", "add", "--all", cwd=folder)
    run("git", "commit", "--quiet", "--allow-empty", "--message", "bench", cwd=folder)
    for name in tag:
        run("git", "tag", name, cwd=folder)


def change(template: Path) -> None:
    """What the second tag of a template brings: a first line more in each file that is there, and another setting."""
    for name in CHANGES:
        path = template / "template" / name
        if path.exists():
            text = path.read_text().replace("async_checkpointing: true", "async_checkpointing: false")
            first, _, rest = text.partition("\n")
            path.write_text(f"{first}\n<!-- New. -->\n{rest}" if "README" in name else f"{first}\n# New.\n{rest}")
    answers = template / "template/{{ _copier_conf.answers_file }}.jinja"
    answers.write_text("# New.\n" + answers.read_text())


def conflicts(project: Path) -> int:
    """Lines of conflict markers that begin a conflict, and rejected patches."""
    found = len(list(project.rglob("*.rej")))
    for path in project.rglob("*"):
        if path.is_file() and ".git" not in path.parts:
            found += path.read_bytes().count(b"<<<<<<< before updating\n")
    return found


def edited(project: Path, name: str, old: str, new: str) -> None:
    """Make one edit of an owner."""
    path = project / name
    path.parent.mkdir(exist_ok=True)
    text = path.read_text() if path.exists() else ""
    if old not in text:
        sys.exit(f"{name} has no {old!r}: renew EDITS in {__file__}")
    path.write_text(text.replace(old, new, 1) if old else text + new)


def main() -> None:
    """Print the median of each and their ratio, then the conflicts."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        templates = {
            "empty template": empty_template(scratch / "empty"),
            "this template": this_template(scratch / "this"),
        }
        projects = {}
        for name, template in templates.items():
            commit(template, "9998.0.0")
            projects[name] = scratch / f"{name} project"
            copier("copy", "--trust", "--defaults", "--quiet", template, projects[name])
            commit(projects[name])
            change(template)
            commit(template, "9999.0.0")
        seconds: dict[str, list[float]] = {name: [] for name in projects}
        for round_ in range(ROUNDS + 1):
            for name, project in projects.items():
                copy = Path(shutil.copytree(project, scratch / f"{name} {round_}"))
                took = copier("update", "--trust", "--defaults", "--quiet", copy)
                if round_:  # the first fills the caches of Copier and of the file system
                    seconds[name].append(took)
        compare(seconds, AIM)

        found = []
        for number, edit in enumerate(EDITS):
            copy = Path(shutil.copytree(projects["this template"], scratch / f"edit {number}"))
            edited(copy, *edit)
            commit(copy)
            copier("update", "--trust", "--defaults", "--quiet", copy)
            found.append(conflicts(copy))
            if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=copy, check=False).returncode == 0:
                sys.exit(f"the update changed nothing after the edit of {edit[0]}")
        apart = sum(found[:-BOTH_CHANGED])
        print(f"conflicts        {apart} in {len(EDITS) - BOTH_CHANGED} edits of other lines (aim: 0), ", end="")
        print(f"{sum(found[-BOTH_CHANGED:])} in {BOTH_CHANGED} of the same line (aim: {BOTH_CHANGED})")


if __name__ == "__main__":
    main()
