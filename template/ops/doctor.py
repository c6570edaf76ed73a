"""Check the whole chain, from the tools on this machine to the pods, one line a check with the next command.

What `make infra` makes is asked for by its own scripts (CHECK=yes), so that both always mean the same things.
"""

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import google.auth
from google.auth.exceptions import DefaultCredentialsError
from rich.text import Text

from ops import checkpoints, diagnosis, kube, manifests, run_env, runs, terminal
from ops.cluster import look
from ops.kube import Kube
from ops.run_env import ROOT, RunEnv
from ops.terminal import UserError

SCRIPT_SECONDS = 180
TOOLS = {
    "gcloud": "cloud.google.com/sdk/docs/install",
    "kubectl": "gcloud components install kubectl",
    "gke-gcloud-auth-plugin": "gcloud components install gke-gcloud-auth-plugin",
}
OLDEST, NEWEST = (1, 4), (1, 7)  # KubeRay that the manifests are made for
# The first KubeRay with a field of the RayJob's schema.
SINCE = [("preRunningDeadlineSeconds", "1.6"), ("authOptions", "1.5"), ("rayJobInfo", "1.4")]


@dataclasses.dataclass(frozen=True)
class Check:
    """One check: `look` returns what it saw or raises UserError. `needs` are checks that must hold first."""

    name: str
    look: Callable[[], str]
    needs: tuple[str, ...] = ()


def tools() -> str:
    """The programs that the commands call are there."""
    missing = [name for name in TOOLS if not shutil.which(name)]
    if missing:
        raise UserError(f"{', '.join(missing)} not on PATH", "; ".join(TOOLS[name] for name in missing))
    return ", ".join(TOOLS)


def answers(run: RunEnv) -> str:
    """No answer is a placeholder."""
    run.refuse_placeholders(*filter(None, run.unanswered.split(",")))
    return f"project {run.project_id}, bucket {run.bucket}, {run.slice_text}"


def credentials() -> str:
    """Python has a login of its own, beside gcloud's."""
    try:
        google.auth.default()
    except DefaultCredentialsError:
        raise UserError("no application default credentials", "gcloud auth application-default login") from None
    return "application default credentials"


def infra(step: str, fix: str | None = None) -> str:
    """What infra/<step>.sh makes is there, as that script itself sees it."""
    try:
        done = subprocess.run(
            ["bash", f"infra/{step}.sh"],
            cwd=ROOT,
            env=os.environ | {"CHECK": "yes"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SCRIPT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"no answer within {SCRIPT_SECONDS} s", f"check the network, then make infra-{step}") from None
    lines = done.stdout.splitlines()
    missing = [line.removeprefix("missing: ") for line in lines if line.startswith("missing: ")]
    errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"missing: {missing[0]}{more}", fix or f"make infra-{step}")
    if done.returncode:
        raise UserError(
            errors[0] if errors else done.stderr.strip()[-300:], "; ".join(errors[1:]) or f"make infra-{step}"
        )
    there = [line.removeprefix("there: ") for line in lines if line.startswith("there: ")]
    return (
        there[0] + (f" (and {len(there) - 1} more)" if len(there) > 1 else "")
        if there
        else (lines or ["nothing to make"])[-1]
    )


def roles() -> str:
    """The roles of the one who is logged in: what cannot be seen on the project may come from elsewhere."""
    try:
        return infra("roles")
    except UserError as problem:
        seen = problem.what.partition(". Whoever")[0]
        return f"{seen}, perhaps more: fine if they come through a group or folder (make infra-roles lists all)"


def bucket(run: RunEnv) -> str:
    """The bucket can be read from here."""
    folder, found = checkpoints.read(run)
    step = checkpoints.resumed_step(found)
    return f"{folder} is read; {'no checkpoint yet' if step is None else f'a resume takes step {step}'}"


def operator(cluster: Kube) -> str:
    """The Ray operator is one that the manifests are made for."""
    installed = cluster.operator_image()
    version = installed.rpartition(":")[2].removeprefix("v") if installed else ""
    if not version:
        definition = cluster.custom_resource("rayjobs.ray.io")
        if definition is None:
            raise UserError("the cluster knows no RayCluster", "make infra-cluster")
        version = operator_version(definition)
    number = tuple(int(part) for part in version.split()[0].split(".")[:2])
    if not OLDEST <= number <= NEWEST:
        raise UserError(
            f"KubeRay {version}, but the manifests are made for {dotted(OLDEST)} to {dotted(NEWEST)}",
            "upgrade the cluster: gcloud container clusters upgrade" if number < OLDEST else "make update",
        )
    return f"KubeRay {version}"


def dotted(number: tuple[int, int]) -> str:
    """Return a version as text."""
    return ".".join(map(str, number))


def operator_version(definition: dict[str, Any]) -> str:
    """Return KubeRay's version by what its RayJob schema knows: GKE hosts the operator where nobody can look."""
    (version,) = [entry for entry in definition["spec"]["versions"] if entry["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]
    known = {
        *schema["spec"]["properties"],
        *schema["status"]["properties"],
        *schema["spec"]["properties"]["rayClusterSpec"]["properties"],
    }
    for place, (field, since) in enumerate(SINCE):
        if field in known:
            return f"{since} or later" if place == 0 else since
    return "1.3 or older"


def namespace(cluster: Kube) -> str:
    """Namespace, service account and Ray's token are there."""
    run = cluster.run
    if not cluster.has_service_account():
        raise UserError(f"no service account {run.service_account} in namespace {run.namespace}", "make cluster")
    (wanted,) = manifests.rendered("cluster")
    source = kube.token_source(wanted)
    if source and cluster.secret(*source) is None:
        raise UserError(f"no secret {source[0]} in namespace {run.namespace}", "make cluster")
    return f"{run.namespace}/{run.service_account}, with a token for Ray"


def raycluster(cluster: Kube) -> str:
    """The RayCluster is there, with the image of the code at hand."""
    name = runs.current(cluster)
    there = cluster.cluster(name)
    if there is None:
        raise UserError(f"no RayCluster {name}", "make cluster (or make job)")
    if kube.image_of(there) != manifests.tag():
        raise UserError(
            f"{name} runs image {kube.image_of(there)}, the code in front of you is {manifests.tag()}",
            "make image, make stop ARGS=--cluster, make cluster",
        )
    return f"{name}, image {kube.image_of(there)}"


def pods(cluster: Kube) -> str:
    """Head and every host are ready."""
    name = runs.current(cluster)
    seen = look(cluster, name, None)
    text = diagnosis.arrival(cluster.run, seen.pods)[1]
    if not diagnosis.complete(cluster.run, seen.pods):
        reasons = diagnosis.explain(cluster.run, seen)
        raise UserError(
            "; ".join([text, *(reason.what for reason in reasons)]), reasons[0].next if reasons else "make cluster"
        )
    return text


def webhook(cluster: Kube) -> str:
    """Every host has the environment that the TPU webhook gives it."""
    run = cluster.run
    problems = diagnosis.of_environment(run, cluster.pods(runs.current(cluster)))
    if problems:
        raise UserError("; ".join(reason.what for reason in problems), problems[0].next)
    return "TPU_NAME, TPU_WORKER_ID" + (", TPU_WORKER_HOSTNAMES" if run.hosts_per_slice > 1 else "")


def ray(cluster: Kube) -> str:
    """The Ray head answers and takes the token."""
    try:
        with runs.head(cluster, runs.current(cluster), answer_minutes=0) as jobs:
            running = jobs.running()
    except UserError as problem:
        raise UserError(problem.what, "make logs ARGS=host=head") from None
    return f"the head answers; {'a run is going' if running else 'nothing runs'}"


def checks(run: RunEnv) -> list[Check]:
    """Return the chain in its order."""
    connected: list[Kube] = []

    def reach() -> str:
        cluster = kube.connect(run)
        connected.append(cluster)
        return f"{cluster.context}, Kubernetes {cluster.version()}"

    def on(function: Callable[[Kube], str]) -> Callable[[], str]:
        return lambda: function(connected[0])

    google = ("tools", "answers")
    return [
        Check("tools", tools),
        Check("answers", lambda: answers(run)),
        Check("login", credentials),
        Check("APIs", lambda: infra("apis"), google),
        Check("your roles", roles, google),
        Check("quota", lambda: infra("quota"), google),
        Check("accounts", lambda: infra("accounts"), google),
        Check("registry", lambda: infra("registry"), google),
        Check("bucket", lambda: infra("bucket"), google),
        Check("bucket from here", lambda: bucket(run), ("answers", "login")),
        Check("pods' access", lambda: infra("access"), (*google, "bucket")),
        Check("image", lambda: infra("image", "make image"), (*google, "registry")),
        Check("GKE cluster", lambda: infra("cluster"), google),
        Check("node pools", lambda: infra("node-pools"), (*google, "GKE cluster")),
        Check("kubectl", reach, ("answers",)),
        Check("Ray operator", on(operator), ("kubectl",)),
        Check("namespace", on(namespace), ("kubectl",)),
        Check("RayCluster", on(raycluster), ("kubectl", "Ray operator")),
        Check("pods", on(pods), ("kubectl", "Ray operator")),
        Check("TPU webhook", on(webhook), ("kubectl", "Ray operator")),
        Check("Ray head", on(ray), ("kubectl", "Ray operator")),
    ]


def examine(listed: list[Check]) -> bool:
    """Run the checks, print a line for each, and return whether all hold. What a failed one rules out is not tried."""
    width = max(len(check.name) for check in listed)
    failed: set[str] = set()
    for check in listed:
        ruled_out = [name for name in check.needs if name in failed]
        mark, seen, next_step = Text("pass", style="green"), "", ""
        if ruled_out:
            mark, seen = Text("  - ", style="dim"), f"not checked: {ruled_out[0]} comes first"
            failed.add(check.name)
        else:
            try:
                seen = check.look()
            except (UserError, run_env.RunEnvError) as problem:
                mark, seen = Text("FAIL", style="bold red"), str(problem)
                if isinstance(problem, UserError):
                    seen, next_step = problem.what, problem.next
                failed.add(check.name)
        terminal.console.print(mark, Text(f"{check.name:<{width}}  {seen}"))
        if next_step:
            terminal.console.print(Text(f"     {'':<{width}}  next: {next_step}", style="bold"))
    return not failed


def main() -> int:
    """Check everything; 0 when all of it holds."""
    return 0 if examine(checks(run_env.load())) else 1


if __name__ == "__main__":
    terminal.run(main)
