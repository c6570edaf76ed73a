"""A recording stand-in for the gcloud binary, and nothing else: it keeps a tiny project in a JSON file.

Run as `gcloud ...` by the scripts under test (tests/test_cloud_infra.py puts it on PATH). Questions (list, describe,
get-iam-policy, get-value) answer from the file; every other command changes it and is recorded. Which flags gcloud
itself would take is not decided here: the recorded lines go through the real gcloud in tests/test_cloud_gcloud.py.

Environment: STAND_IN_STATE is the JSON file; STAND_IN_FAIL_AT=n makes the n-th changing command of this state fail.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

QUESTIONS = {"list", "describe", "get-iam-policy", "get-value"}


class Project:
    """What exists, by kind and name. A value of a resource is its status; of a grant, nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text())

    def save(self) -> None:
        self.path.write_text(json.dumps(self.data, indent=1))

    def kind(self, name: str) -> dict[str, str]:
        resources: dict[str, dict[str, str]] = self.data.setdefault("resources", {})
        return resources.setdefault(name, {})


def flags_of(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split into words and flags; a flag without a value is mapped to ""."""
    words = [a for a in arguments if not a.startswith("--")]
    flags = dict(a.removeprefix("--").partition("=")[::2] for a in arguments if a.startswith("--"))
    return words, flags


def resource(words: list[str], flags: dict[str, str]) -> tuple[str, str]:
    """Return the kind of thing a command speaks of, and the name in it."""
    text = " ".join(words)
    if text.startswith("storage rm"):
        return "buckets", words[2].removeprefix("gs://")
    for prefix, kind in {
        "container clusters": "clusters",
        "container node-pools": "pools",
        "container operations": "operations",
        "iam service-accounts": "accounts",
        "artifacts repositories": "repositories",
        "artifacts docker images": "images",
        "compute resource-policies": "policies",
        "beta quotas": "quotas",
        "storage buckets": "buckets",
        "builds submit": "images",
        "services": "services",
        "projects": "projects",
        "config": "config",
    }.items():
        if text.startswith(prefix):
            return kind, words[-1].removeprefix("gs://")
    raise SystemExit(f"stand-in: unknown command {text}")


def answer(project: Project, verb: str, kind: str, name: str, flags: dict[str, str]) -> str:
    """Answer a question as gcloud would with the --filter and --format in use."""
    wanted = flags.get("filter", "")
    if kind == "config":
        return str(project.data["account"])
    if kind == "projects" and verb == "describe":
        return "123456789012"
    if kind == "services":
        return "\n".join(project.kind("services"))
    if verb == "get-iam-policy":
        place = "project" if kind == "projects" else f"{kind}/{name}"
        role = re.search(r"bindings.role~\^(\S+)\$", wanted)
        member = re.search(r"bindings.members~\^(\S+)\$", wanted)
        found = [
            ",".join(grant.split(" ")[1:]) if "csv" in flags.get("format", "") else grant.split(" ")[1]
            for grant in project.kind("grants")
            if grant.startswith(f"{place} ")
            and (not role or grant.split(" ")[1] == role[1])
            and (not member or grant.split(" ")[2] == member[1])
        ]
        return "\n".join(found)
    if kind == "images":
        match = re.search(r"package~\^(\S+)\$ AND tags~\^(\w+)\$", wanted)
        assert match, wanted
        return "sha256:0" if f"{match[1]}:{match[2]}" in project.kind("images") else ""
    if kind == "buckets" and verb == "describe":
        return project.kind("buckets")[name]
    if kind == "clusters" and verb == "describe":
        return str(project.data.get("cluster_state", f"True,True,{flags['project']}.svc.id.goog"))
    if kind == "quotas":
        if "quotas" not in project.data:
            raise SystemExit("stand-in: no permission to see quotas")
        return "\n".join(project.data["quotas"])
    if kind == "operations":
        return "operation-1"
    match = re.search(r"(?:name|email)(?:=|~/repositories/|~\^)([^\s$]+)", wanted)
    assert match, (kind, wanted)
    if match[1] not in project.kind(kind):
        return ""
    if "created-by" in wanted and match[1] in project.data.get("foreign", []):
        return ""
    return project.kind(kind)[match[1]] if "status" in flags.get("format", "") else match[1]


def change(project: Project, words: list[str], kind: str, name: str, flags: dict[str, str]) -> None:
    """Carry a changing command out."""
    verb = next(w for w in words if w in ACTIONS)
    if verb == "enable":
        for api in words[2:]:
            project.kind("services")[api] = ""
    elif verb in ("add-iam-policy-binding", "remove-iam-policy-binding"):
        place = "project" if kind == "projects" else f"{kind}/{name}"
        grant = f"{place} {flags['role']} {flags['member']}"
        if verb.startswith("add"):
            project.kind("grants")[grant] = ""
        else:
            del project.kind("grants")[grant]
    elif verb == "submit":
        values = dict(pair.split("=", 1) for pair in flags["substitutions"].split(","))
        project.kind("images")[f"{values['_IMAGE']}:{values['_TAG']}"] = ""
    elif verb == "wait":
        for pools_or_clusters in ("clusters", "pools"):
            for pending, status in project.kind(pools_or_clusters).items():
                if status == "PROVISIONING":
                    project.kind(pools_or_clusters)[pending] = "RUNNING"
    elif verb in ("delete", "rm"):
        del project.kind(kind)[name]
        for grant in [grant for grant in project.kind("grants") if grant.startswith(f"{kind}/{name} ")]:
            del project.kind("grants")[grant]
        if kind == "clusters":
            project.kind("pools").clear()
    elif verb in ("create", "create-auto"):
        if kind == "accounts":
            name = f"{name}@{flags['project']}.iam.gserviceaccount.com"
        if name in project.kind(kind):
            raise SystemExit(f"stand-in: {kind} {name} exists already")
        project.kind(kind)[name] = flags["location"].upper() if kind == "buckets" else "RUNNING"


ACTIONS = [
    "enable",
    "add-iam-policy-binding",
    "remove-iam-policy-binding",
    "submit",
    "wait",
    "delete",
    "rm",
    "get-credentials",
    "create",
    "create-auto",
]


def main() -> int:
    project = Project(Path(os.environ["STAND_IN_STATE"]))
    words, flags = flags_of(sys.argv[1:])
    kind, name = resource(words, flags)
    verb = next((w for w in words if w in QUESTIONS), "")
    if verb:
        project.data.setdefault("asked", []).append(sys.argv[1:])
        text = answer(project, verb, kind, name, flags)
        if text:
            print(text)
    else:
        calls = project.data.setdefault("calls", [])
        calls.append(sys.argv[1:])
        if str(len(calls)) == os.environ.get("STAND_IN_FAIL_AT"):
            print("ERROR: (gcloud) the stand-in was told to fail here", file=sys.stderr)
            calls.pop()
            project.save()
            return 1
        change(project, words, kind, name, flags)
    project.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
