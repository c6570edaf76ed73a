"""A real Kubernetes API server on this machine, for the tests marked `cluster`.

The programs are built from their Go modules (tools/control-plane/go.mod has the versions, go.sum the checksums). There
are no nodes and no controllers yet: what is written to the API server stays as it is written. A new program, such as
the scheduler or the KubeRay operator, is one line in go.mod's `tool` list and one `self._start(...)` here.
"""

import contextlib
import functools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import kubernetes
import urllib3
import yaml

ROOT = Path(__file__).resolve().parent.parent
MODULE = ROOT / "tools" / "control-plane"
PROGRAMS = ROOT / "build" / "control-plane"
START_SECONDS = 300  # seconds on an idle machine, minutes on a busy one

KUBERAY = "github.com/ray-project/kuberay/ray-operator"
KUEUE = "sigs.k8s.io/kueue"
# Every minor from 1.4 on that the Go module proxy serves, newest last. It has no 1.7.0.
KUBERAY_VERSIONS = ["v1.4.2", "v1.5.1", "v1.6.2"]
KUEUE_VERSIONS = ["v0.15.2", "v0.17.0"]
CRD_FOLDERS = {KUBERAY: "config/crd/bases", KUEUE: "config/components/crd/bases"}


class ControlPlaneError(RuntimeError):
    """The control plane cannot be built or started; the message says what to do."""


def _go(*arguments: str, cwd: Path, timeout: float = 300, **environment: str) -> str:
    """Run go and return what it prints."""
    go = shutil.which("go")
    if go is None:
        raise ControlPlaneError(
            "test-cluster builds a Kubernetes API server with Go, and there is no go on PATH: install Go 1.25 or newer "
            "(https://go.dev/dl, or your package manager), then run `make test-cluster` again. `make test` needs no Go."
        )
    done = subprocess.run(
        [go, *arguments], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        raise ControlPlaneError(f"go {' '.join(arguments)} failed:\n{(done.stderr or done.stdout).strip()[-3000:]}")
    return done.stdout


def build() -> None:
    """Build what is not built yet into build/control-plane, with a line of progress every few seconds.

    Go keeps what it compiled in its own cache, so only the very first build on a machine takes minutes.
    """
    go = shutil.which("go") or _go("version", cwd=MODULE)
    started = time.monotonic()
    environment = os.environ | {"GOBIN": str(PROGRAMS), "GOFLAGS": f"{os.environ.get('GOFLAGS', '')} -mod=readonly"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [go, "install", "-v", "-ldflags=-s -w", "tool"], cwd=MODULE, env=environment, stdout=output, stderr=output
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=15)
                if process.poll() is None:
                    output.seek(0)
                    compiled = sum(not line.startswith("go: ") for line in output)
                    seconds = time.monotonic() - started
                    print(f"control plane: building, {compiled} packages compiled in {seconds:.0f} s", flush=True)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        output.seek(0)
        if process.returncode:
            raise ControlPlaneError(f"the control plane does not build:\n{output.read().strip()[-3000:]}")
        compiled = sum(not line.startswith("go: ") for line in output)
    print(f"control plane: built in {time.monotonic() - started:.0f} s ({compiled} packages compiled)", flush=True)


@functools.cache
def module(name: str, version: str) -> Path:
    """Fetch a Go module's release, checked against Go's checksum database, and return its folder."""
    answer = _go("mod", "download", "-json", f"{name}@{version}", cwd=Path("/"), GOFLAGS="-mod=mod")
    return Path(json.loads(answer)["Dir"])


@functools.cache
def custom_resource_definitions(name: str, version: str) -> list[dict[str, Any]]:
    """Read the CRDs that a Go module's release carries."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a file has 30,000 lines
    folder = module(name, version) / CRD_FOLDERS[name]
    return [yaml.load(path.read_text(), loader) for path in sorted(folder.glob("*.yaml"))]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


class Refused(AssertionError):
    """The API server refused a resource; the message is the server's own."""


class ControlPlane:
    """etcd and kube-apiserver, from `with ControlPlane() as api_server:` to its end.

    Everything is kept in a temporary folder and listens on free ports of 127.0.0.1. The processes end with the `with`
    block, and also when this process is killed.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="control-plane-"))
        self.kubeconfig = self.folder / "kubeconfig"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._installed: dict[str, str] = {}
        self._guards: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "ControlPlane":
        try:
            self._start_all()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_all(self) -> None:
        # Go ships this small program with its standard library: a key and a certificate for it.
        generator = Path(_go("env", "GOROOT", cwd=MODULE).strip()) / "src/crypto/tls/generate_cert.go"
        _go("run", str(generator), "--host=127.0.0.1", "--ca", cwd=self.folder)
        certificate, key, token = self.folder / "cert.pem", self.folder / "key.pem", secrets.token_hex(16)
        (self.folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
        etcd, peer, secure = _free_ports(3)
        self._start(
            "etcd",
            "server",  # go install names a program after its module
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        )
        self._wait("etcd", f"http://127.0.0.1:{etcd}/health")
        self._start(
            "kube-apiserver",
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={secure}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--cert-dir={self.folder}",
            "--service-cluster-ip-range=10.0.0.0/24",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            # It waits for service accounts that only the controller manager makes.
            "--disable-admission-plugins=ServiceAccount",
        )
        server = f"https://127.0.0.1:{secure}"
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [
                        {"name": "test", "cluster": {"server": server, "certificate-authority": str(certificate)}}
                    ],
                    "users": [{"name": "admin", "user": {"token": token}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
                    "current-context": "test",
                }
            )
        )
        self.client = kubernetes.config.new_client_from_config(config_file=str(self.kubeconfig))
        self._wait_ready()
        self.dynamic = kubernetes.dynamic.DynamicClient(self.client, cache_file=str(self.folder / "discovery.json"))

    def _start(self, name: str, program: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [PROGRAMS / program, *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the tests first, and they end it
            )
        self._processes[name] = process
        # Ends the program when this process is no longer there to do it: its end of the pipe closes then.
        guard = ["sh", "-c", 'read -r _; kill -9 "$1"; rm -rf "$2"', "guard", str(process.pid), str(self.folder)]
        self._guards.append(subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True))

    def _check_running(self, name: str, deadline: float) -> None:
        code = self._processes[name].poll()
        if code is not None or time.monotonic() > deadline:
            what = f"ended with status {code}" if code is not None else f"was not ready after {START_SECONDS} s"
            log = (self.folder / f"{name}.log").read_text(errors="replace")
            raise ControlPlaneError(f"{name} {what}. The end of its log:\n{log[-3000:]}")

    def _wait(self, name: str, url: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5):
                return
            self._check_running(name, deadline)
            time.sleep(0.1)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(kubernetes.client.ApiException, urllib3.exceptions.HTTPError):
                self.request("GET", "/readyz")
                return
            self._check_running("kube-apiserver", deadline)
            time.sleep(0.2)

    def pids(self) -> list[int]:
        """Return the process ids of the programs."""
        return [process.pid for process in self._processes.values()]

    def stop(self) -> None:
        """End the programs, the API server first, and remove the folder."""
        for guard in self._guards:
            guard.kill()
            guard.communicate()
        for process in reversed(self._processes.values()):
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def request(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        """Send one request; the answer is parsed JSON, or text where it is none."""
        response = self.client.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params={"Accept": "application/json, */*", "Content-Type": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
        )
        data = response.data
        with contextlib.suppress(ValueError):
            return json.loads(data)
        return data.decode()

    def create(self, resource: dict[str, Any], **query: str) -> Any:
        """Create a resource with strict field validation: unknown and repeated fields are errors.

        Raises:
            Refused: the API server does not take it
        """
        kind = self.dynamic.resources.get(api_version=resource["apiVersion"], kind=resource["kind"])
        namespace = resource["metadata"].get("namespace", "default") if kind.namespaced else None
        path = kind.path(namespace=namespace)
        try:
            return self.request("POST", path, resource, fieldValidation="Strict", **query)
        except kubernetes.client.ApiException as error:
            message = json.loads(error.body).get("message", error.body)
            raise Refused(f"{resource['kind']} {resource['metadata'].get('name')}: {message}") from None

    def ensure_namespace(self, name: str) -> None:
        """Create a namespace unless it is there."""
        with contextlib.suppress(kubernetes.client.ApiException):
            self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})

    def install(self, name: str, version: str) -> None:
        """Install the CRDs of a Go module's release, over those of another release if they are there."""
        if self._installed.get(name) == version:
            return
        definitions = custom_resource_definitions(name, version)
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for definition in definitions:
            own = f"{path}/{definition['metadata']['name']}"
            try:
                present = self.request("GET", own)
            except kubernetes.client.ApiException:
                self.request("POST", path, definition)
            else:
                version_now = present["metadata"]["resourceVersion"]
                metadata = definition["metadata"] | {"resourceVersion": version_now}
                self.request("PUT", own, definition | {"metadata": metadata})
        deadline = time.monotonic() + START_SECONDS
        for definition in definitions:
            while True:
                now = self.request("GET", f"{path}/{definition['metadata']['name']}")
                # Null until the server has looked at it.
                found = now.get("status", {}).get("conditions") or []
                conditions = {each["type"]: each["status"] for each in found}
                if conditions.get("Established") == "True":
                    break
                if time.monotonic() > deadline:
                    raise ControlPlaneError(f"{definition['metadata']['name']} is not established: {conditions}")
                time.sleep(0.1)
        self._installed[name] = version
        self.dynamic.resources.invalidate_cache()


if __name__ == "__main__":
    try:
        build()
    except ControlPlaneError as problem:
        sys.exit(f"test-cluster: {problem}")
