"""Follow the template: what `make update`, `make reconfigure` and `make drift` do around Copier.

Copier merges well and ends quietly: exit code 0 with conflicts, an edited file gone because the template dropped it, an
answer replaced because it no longer fits. Here the change is made in a clone first, and each of these is said. Needs
Copier and nothing of requirements.lock; the Makefile brings it in an environment of its own.
"""

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import copier
import yaml
from copier.errors import CopierError, UserMessageError
from plumbum import ProcessExecutionError

from ops import image_tag, run_env

ROOT = Path(__file__).resolve().parent.parent
ANSWERS = ".copier-answers.yml"
SHOWN_FILES = 20  # of a kind, in a list; git shows the rest

# What has to be done again in the cloud when one of these keys of run.env changes. {old[KEY]} is its value before.
REDO: list[tuple[set[str], str]] = [
    (
        {"GENERATION", "TOPOLOGY", "NUM_SLICES", "CAPACITY", "RESERVATION", "MACHINE_TYPE", "ZONE", "CLUSTER_MODE"},
        "node pools: make infra makes the new ones. Those of before stay, and are billed, until they are deleted:\n"
        "  gcloud container node-pools list --project={old[PROJECT_ID]} --cluster={old[CLUSTER_NAME]}"
        " --location={old[CLUSTER_LOCATION]}",
    ),
    (
        {"PROJECT_ID", "CLUSTER_NAME", "CLUSTER_MODE", "CLUSTER_LOCATION"},
        "cluster: make infra makes the new one; to remove the one of before, make destroy at the commit of before",
    ),
    (
        {"BUCKET"},
        "bucket: make infra makes the new one; data and checkpoints stay in gs://{old[BUCKET]} until you copy them",
    ),
    (
        {"PROJECT_NAME", "RUN_NAME"},
        "checkpoints: under another name the run starts from nothing; those of before stay where they are",
    ),
    (
        {"MODEL"},
        "checkpoints: {new[MODEL]} cannot resume those of {old[MODEL]}; for a fresh start give a new run_name as well",
    ),
]


class Failure(Exception):
    """The command cannot go on; the message says why and what to do."""


def git(folder: Path, *arguments: str) -> str:
    """Return what git prints in `folder`, without the last line end. Raises Failure with git's own message."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(f"git {arguments[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.rstrip("\n")


def names(folder: Path, *arguments: str) -> list[str]:
    """Return the file names that a git command prints with -z, relative to `folder`."""
    return [name for name in git(folder, *arguments).split("\0") if name]


def recorded_answers(folder: Path) -> dict[str, Any]:
    """Return the answers file of `folder`. Raises Failure when there is none or it names no version."""
    try:
        answers = yaml.safe_load((folder / ANSWERS).read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise Failure(f"{ANSWERS} is missing: bring it back from git, no update is possible without it") from None
    if missing := {"_src_path", "_commit"} - answers.keys():
        raise Failure(f"{ANSWERS} has no {' and '.join(sorted(missing))}: bring it back from git")
    return dict(answers)


def require_clean(folder: Path) -> None:
    """Raise Failure unless everything in `folder` is committed: only then can git undo what follows."""
    try:
        git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
    except Failure:
        raise Failure('nothing is committed here yet: git init && git add . && git commit -m "Start"') from None
    if changed := git(folder, "status", "--porcelain", "--", "."):
        raise Failure(
            f"there are changes that are not committed:\n{changed}\nCommit or stash them, then run this again."
        )


def with_copier(source: str, action: Callable[[], Any]) -> Any:
    """Return what `action` returns; turn what Copier raises into a Failure that says what a person can do."""
    try:
        return action()
    except UserMessageError as error:
        raise Failure(str(error).replace("Add --data ", "Give also ")) from None
    except (CopierError, ValueError) as error:
        raise Failure(f"Copier, with the template {source}: {error}") from None
    except ProcessExecutionError as error:
        raise Failure(
            f"the template cannot be read from {source} (_src_path in {ANSWERS}):\n{error.stderr.strip()}"
        ) from None


def render(answers: dict[str, Any], folder: Path, exclude: tuple[str, ...] = ()) -> Any:
    """Render into `folder` what `answers` give at the version they were recorded with, and return Copier's worker.

    `exclude` are patterns of files to leave out; with all left out only the questionnaire is gone through.
    """
    return with_copier(
        answers["_src_path"],
        lambda: copier.run_copy(
            answers["_src_path"],
            folder,
            data={name: value for name, value in answers.items() if not name.startswith("_")},
            vcs_ref=answers["_commit"],
            exclude=exclude,
            defaults=True,
            overwrite=True,
            quiet=True,
            unsafe=True,
        ),
    )


def apply(folder: Path, vcs_ref: Any, data: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Update the repository in `folder`.

    Returns (files with conflicts, files that the template no longer has but their owner had edited). The latter are
    brought back: Copier deletes them without a word.
    """
    before = recorded_answers(folder)
    with_copier(
        before["_src_path"],
        lambda: copier.run_update(
            folder, data=data, vcs_ref=vcs_ref, defaults=True, overwrite=True, quiet=True, unsafe=True
        ),
    )
    conflicts = names(folder, "diff", "--name-only", "--diff-filter=U", "--relative", "-z")
    deleted = names(folder, "diff", "--name-only", "--diff-filter=D", "--relative", "-z", "HEAD")
    kept = []
    if deleted:
        with tempfile.TemporaryDirectory() as original:
            render(before, Path(original))
            for name in deleted:
                file = Path(original) / name
                committed = subprocess.run(
                    ["git", "show", f"HEAD:./{name}"], cwd=folder, capture_output=True, check=True
                )
                if not file.exists() or file.read_bytes() != committed.stdout:
                    git(folder, "checkout", "--quiet", "HEAD", "--", name)
                    kept.append(name)
    return conflicts, kept


def some(files: list[str]) -> str:
    """The files, a line each; only the first when there are many."""
    lines = [f"  {name}" for name in files[:SHOWN_FILES]]
    if len(files) > SHOWN_FILES:
        lines.append(f"  and {len(files) - SHOWN_FILES} more")
    return "\n".join(lines)


def changed_answers(before: dict[str, Any], after: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """Say which answers are other than before, and which of them nobody asked for."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name.startswith("_") or before.get(name) == after.get(name):
            continue
        if name not in after:
            lines.append(f"  {name}: {before[name]} is no longer asked for")
        elif name not in before:
            lines.append(f"  {name}: {after[name]} (new question, its default)")
        else:
            why = "" if name in given else " (not given: it follows, or the old value is no longer offered)"
            lines.append(f"  {name}: {before[name]} -> {after[name]}{why}")
    return lines


def image(folder: Path) -> str:
    """Return the tag of the image that `folder` gives, "" when it gives none because a file is missing."""
    try:
        return image_tag.image_tag(folder)
    except FileNotFoundError:
        return ""


def redo(before: Path, after: Path) -> list[str]:
    """Say what has to be done again in the cloud after a change from one repository to the other, if it was up."""
    # This code is of the old version, and may know keys that the new one no longer has.
    old, new = (defaultdict(lambda: "?", run_env.read(folder / "run.env")) for folder in (before, after))
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    lines = []
    for keys, text in REDO:
        if keys & changed:
            lines.append(text.format(old=old, new=new))
    manifests = [
        {file.relative_to(root): file.read_bytes() for file in (root / "k8s").rglob("*") if file.is_file()}
        for root in (before, after)
    ]
    if manifests[0] != manifests[1]:
        lines.append(
            "RayCluster and RayJob: what runs now does not change: make stop ARGS=--cluster at the commit of before,\n"
            "  then make cluster, or make job"
        )
    if image(before) != image(after):
        lines.append("image: its content changed, and so did its tag: make image")
    counts = {"NUM_SLICES", "DEVICES_PER_SLICE"}
    if counts & changed and counts <= old.keys() & new.keys() and {"MODEL", "RUN_NAME"}.isdisjoint(changed):
        devices = [int(env["NUM_SLICES"]) * int(env["DEVICES_PER_SLICE"]) for env in (old, new)]
        batch = [
            count * yaml.safe_load((root / "config/train.yml").read_text(encoding="utf-8"))["per_device_batch_size"]
            for count, root in zip(devices, (before, after), strict=True)
        ]
        text = (
            f"resuming {new['RUN_NAME']} on {devices[1]} devices instead of {devices[0]}: the weights are laid out\n"
            f"  anew; a step has {batch[1]:g} sequences instead of {batch[0]:g}, under the same learning rate."
        )
        if recorded_answers(after)["dataset_type"] == "grain":
            text += " Grain keeps its\n  place in the data per host, and finds it only on the same number of hosts."
        lines.append(f"{text}\n  For a fresh start give a new run_name as well")
    return lines


def following(answers: dict[str, Any], given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what `given` changes in answers that were never chosen but follow from others by their default.

    Copier would keep them, since it records a default like a choice: the zone of the old generation, for example.
    `folder` is scratch space. Raises Failure when the questionnaire refuses the answers.
    """
    worker = render(answers, folder / "as-recorded", ("*",))
    followers = set()
    for name, question in worker.template.questions_data.items():
        default = question.get("default")
        if name in answers and name not in given and isinstance(default, str) and "{" in default:
            try:
                text = worker.jinja_env.from_string(default).render(**answers, _copier_conf={"defaults": True})
            except UserMessageError:
                continue  # has no default with these answers
            if text.strip() == str(answers[name]):
                followers.add(name)
    rest = {name: value for name, value in answers.items() if name not in followers} | given
    result = render(rest, folder / "as-given", ("*",)).answers.combined
    return {name: result[name] for name in sorted(followers) if result[name] != answers[name]}


def take_over(clone: Path, top: Path, stages: str) -> None:
    """Make in `top` the change that is staged in its `clone`, with the conflicts `stages` of ls-files --unmerged -z."""
    patch = subprocess.run(["git", "diff", "--cached", "--binary", "HEAD"], cwd=clone, capture_output=True, check=True)
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn"], cwd=top, input=patch.stdout, capture_output=True, check=False
    )
    if done.returncode:
        raise Failure(f"the change could not be made, and nothing was: {done.stderr.decode().strip()}")
    entries = [entry.partition("\t") for entry in stages.split("\0") if entry]
    for entry, _, _ in entries:
        blob = entry.split()[1]
        content = subprocess.run(["git", "cat-file", "blob", blob], cwd=clone, capture_output=True, check=True).stdout
        subprocess.run(["git", "hash-object", "-w", "--stdin"], cwd=top, input=content, capture_output=True, check=True)
    # As git itself records a conflict: without the plain entry, with one for each of base, yours and theirs.
    lines = [f"0 {'0' * 40}\t{name}" for name in sorted({name for _, _, name in entries})]
    lines += [f"{entry}\t{name}" for entry, _, name in entries]
    subprocess.run(["git", "update-index", "--index-info"], cwd=top, input="\n".join(lines), text=True, check=True)


def parsed(arguments: list[str], answers: dict[str, Any]) -> dict[str, Any]:
    """Return NAME=VALUE words as a dict. Raises Failure for a name that is no answer, or another kind of word."""
    if not arguments:
        raise Failure(f'which answer? For example: make reconfigure ARGS="topology=4x8". {ANSWERS} lists them all')
    given = {}
    for word in arguments:
        name, equals, value = word.removeprefix("--data=").partition("=")
        if not equals:
            raise Failure(f"'{word}' is not NAME=VALUE. For example: make reconfigure ARGS=\"topology=4x8\"")
        if name not in answers or name.startswith("_"):
            near = difflib.get_close_matches(name, answers, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"{ANSWERS} lists them."
            raise Failure(f"there is no answer '{name}'. {hint}")
        given[name] = value
    return given


def change(vcs_ref: Any, given: dict[str, Any], dry_run: bool, whole_diff: bool) -> int:
    """Show what an update to `vcs_ref` with the answers `given` does, made in a clone, then take it over.

    Returns the exit code: 1 when there are conflicts to resolve.
    """
    before = recorded_answers(ROOT)
    top = Path(git(ROOT, "rev-parse", "--show-toplevel"))
    with tempfile.TemporaryDirectory() as scratch:
        data = given | (following(before, given, Path(scratch)) if given else {})
        clone = Path(scratch) / "clone"
        git(top, "clone", "--quiet", "--shared", ".", str(clone))
        copy = clone / ROOT.relative_to(top)
        conflicts, kept = apply(copy, vcs_ref, data)
        after = recorded_answers(copy)
        stages = git(clone, "ls-files", "--unmerged", "-z")
        git(clone, "add", "--all")
        how = ["--unified=1", "--relative"] if whole_diff else ["--stat=110", "--relative"]
        diff = git(copy, "diff", "--cached", "--color=always" if sys.stdout.isatty() else "--color=never", *how, "HEAD")
        again = redo(ROOT, copy)
        if diff and not dry_run:
            take_over(clone, top, stages)
    if not diff:
        print("Nothing changes.")
        return 0
    print(diff)
    if before["_commit"] != after["_commit"]:
        print(
            f"\nTemplate: {before['_commit']} -> {after['_commit']}. Its CHANGELOG.md says why, and what to do first."
        )
    if lines := changed_answers(before, after, given):
        print("\nAnswers:", *lines, sep="\n")
    if again:
        print("\nTo be done again, if it is in the cloud already:", *(f"- {line}" for line in again), sep="\n")
    if kept:
        print(
            "\nThe template has removed or renamed these, which you had edited. They are kept: move what you need, then"
            f" delete them.\n{some(kept)}"
        )
    if conflicts:
        print(f"\nConflicts, since you and the template changed the same lines:\n{some(conflicts)}")
    if dry_run:
        print("\nNothing was changed: this was a dry run.")
    else:
        print("\nTo undo all of it: git restore --source=HEAD --staged --worktree . && git clean -fd .")
        if conflicts:
            print("To go on: edit these files (search for <<<<<<<), git add them, then: make check")
        if "requirements.lock" in conflicts:
            print("requirements.lock is written anew by: git checkout --theirs requirements.lock && make lock")
    return 1 if conflicts else 0


def check() -> int:
    """Run the repository's own checks, and say what is next."""
    print("\nupdated; now make check", flush=True)
    status = subprocess.run([os.environ.get("MAKE", "make"), "check"], cwd=ROOT, check=False).returncode
    if status:
        print("The update is in place, but make check fails (see above). Mend it, or undo the update.")
        return 1
    print("Next: git diff, make rehearse, git commit.")
    return 0


def update(arguments: argparse.Namespace) -> int:
    """Take the newest version of the template: show what changes, change it, run make check."""
    require_clean(ROOT)
    answers = recorded_answers(ROOT)
    # As a command of its own, which needs no trust: nothing of a new version runs before it is known that there is one.
    done = subprocess.run(
        [sys.executable, "-m", "copier", "check-update", "--quiet", str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    if done.returncode == 0:
        print(f"{answers['_commit']} is the newest version of {answers['_src_path']}.")
        return 0
    if done.returncode != 2:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Failure(f"the template cannot be read from {answers['_src_path']} (_src_path in {ANSWERS}): {reason}")
    status = change(None, {}, arguments.dry_run, arguments.diff)
    return status or (0 if arguments.dry_run or arguments.no_check else check())


def reconfigure(arguments: argparse.Namespace) -> int:
    """Change answers at the version the repository is on, with all that follows from them."""
    require_clean(ROOT)
    given = parsed(arguments.answer, recorded_answers(ROOT))
    status = change(copier.VcsRef.CURRENT, given, arguments.dry_run, True)
    if not status and not arguments.dry_run:
        print("Next: make rehearse, git commit.")
    return status


def drift(arguments: argparse.Namespace) -> int:
    """Show how far this repository is from what its answers would render, by whose file it is."""
    answers = recorded_answers(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        ownership = render(answers, Path(folder)).answers.combined["ownership"]
        rendered = sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file())
        changed: dict[str, list[str]] = {"template": [], "shared": [], "owner": []}
        for name in rendered:
            ours, theirs = ROOT / name, Path(folder) / name
            if ours.is_file() and ours.read_bytes() == theirs.read_bytes():
                continue
            numbers = subprocess.run(
                ["git", "diff", "--no-index", "--numstat", str(theirs), str(ours) if ours.exists() else os.devnull],
                capture_output=True,
                text=True,
                check=False,
            ).stdout.split()
            changed[owner_of(name, ownership)].append(
                f"{name:<40} +{numbers[0]} -{numbers[1]}" if ours.exists() else f"{name:<40} deleted"
            )
            if arguments.diff and ours.exists():
                subprocess.run(
                    [
                        "git",
                        "--no-pager",
                        "diff",
                        "--no-index",
                        "--src-prefix=rendered:",
                        "--dst-prefix=",
                        theirs,
                        ours,
                    ],
                    check=False,
                )
    added = set(names(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")) - set(rendered)
    meaning = {
        "template": "The template's, changed here: an update merges them, and conflicts on the same lines",
        "shared": "Shared, changed here: as meant, and merged by an update",
        "owner": "Yours, changed here: no update touches them",
    }
    print(f"Against {answers['_commit']} of {answers['_src_path']}, with the answers in {ANSWERS}:")
    for owner, text in meaning.items():
        print(f"{text}: {len(changed[owner])}")
        if changed[owner]:
            print(some(changed[owner]))
    print(f"Yours, added here: {len(added)}; identical: {len(rendered) - sum(map(len, changed.values()))} files")
    return 0


def owner_of(name: str, ownership: dict[str, list[str]]) -> str:
    """Return whose the file is: owner, shared or template. `ownership` is what copier.yml lists for each."""
    for owner, entries in ownership.items():
        if any(fnmatchcase(name, f"{entry}*" if entry.endswith("/") else entry) for entry in entries):
            return owner
    return "template"


def main() -> int:
    """Exit code 0 when done, 1 when there is something to mend, with a message."""
    parser = argparse.ArgumentParser(prog="python -m ops.template", description=main.__doc__)
    commands = parser.add_subparsers(required=True)
    for action in (update, reconfigure, drift):
        command = commands.add_parser(action.__name__, description=action.__doc__, help=action.__doc__)
        command.set_defaults(action=action)
        if action is not drift:
            command.add_argument("--dry-run", action="store_true", help="only show what would change")
        if action is not reconfigure:
            command.add_argument("--diff", action="store_true", help="show every changed line")
        if action is update:
            command.add_argument("--no-check", action="store_true", help="leave out make check afterwards")
        if action is reconfigure:
            command.add_argument("answer", nargs="*", metavar="NAME=VALUE", help="an answer to change")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        return int(arguments.action(arguments))
    except (Failure, run_env.RunEnvError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
