"""TPU slices without a TPU: a local Ray whose nodes look to Ray like the hosts of GKE TPU slices.

Each simulated host is a raylet with the environment that GKE's device plugin and KubeRay's TPU webhook give a TPU pod.
Ray derives its slice labels and the slice's head resource from that environment, exactly as it does on the slice.
"""

import os
import secrets
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from ops.run_env import RunEnv

NODE_MARK = "SIMULATED_NODE_ID"
MARK = "SIMULATED_SLICE_ID"  # in the environment of everything started here, so that all of it can be found again
OBJECT_STORE_BYTES = 80 * 2**20  # the least Ray accepts; nothing of the training passes through it
JOIN_SECONDS = 180
STOP_SECONDS = 10
ATTEMPTS = 3  # to start a node: Ray gives it 30 s, whatever else the machine is doing


class SliceError(RuntimeError):
    """The simulated hosts did not come up; the message says what to do."""


class SimulatedSlices:
    """The hosts of `run`'s slices on this machine. Use as a context manager: leaving it ends all that it started."""

    def __init__(self, run: RunEnv) -> None:
        self.run = run
        self.id = secrets.token_hex(8)
        # Unix sockets take 107 characters, so Ray's files cannot live in the repository.
        self.folder = Path(tempfile.mkdtemp(prefix="slice-", dir="/tmp"))
        self.environment = {
            MARK: self.id,
            # Also keeps the address files of this Ray and of another one apart.
            "RAY_TMPDIR": str(self.folder),
            # Said outright: Ray otherwise turns tokens on or off by what an earlier Ray left in the home folder.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_worker_niceness": "0",  # workers are what this machine is for just now
        }
        os.environ.update(self.environment)
        # Ray reads its environment when it is imported.
        from ray.cluster_utils import Cluster

        # Ray's own clean-up wants the main thread and this process's SIGTERM; `stop` does it instead.
        self._cluster = Cluster(shutdown_at_exit=False)

    def __enter__(self) -> "SimulatedSlices":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Where a driver connects: RAY_ADDRESS."""
        return self._cluster.address

    def _add_node(self, env_vars: dict[str, str], **arguments: Any) -> None:
        """Start one node, again if Ray finds it too slow. None offers CPUs: Ray would start idle workers for them."""
        for attempt in range(1, ATTEMPTS + 1):
            mark = {NODE_MARK: secrets.token_hex(8)}
            try:
                self._cluster.add_node(
                    num_cpus=0, object_store_memory=OBJECT_STORE_BYTES, env_vars=env_vars | mark, **arguments
                )
                return
            except Exception as error:  # Ray raises a bare Exception for a slow node
                end(self.processes(mark))
                if attempt == ATTEMPTS:
                    raise SliceError(
                        f"a simulated host did not start in {ATTEMPTS} attempts of 30 s each "
                        f"(load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores): "
                        f"end what else runs here, then rehearse again. Ray says: {error}"
                    ) from None

    def start_head(self) -> None:
        """Start Ray's head, which offers no CPU for work, as on the cluster. Raises SliceError."""
        self._add_node(
            {},
            node_ip_address=self._ip(1),
            include_dashboard=False,
            no_monitor=True,
            dashboard_agent_listen_port=free_port(),
        )

    def start_hosts(self, worker_environment: dict[str, str]) -> None:
        """Start every host of every slice, one after the other; their Ray workers inherit `worker_environment`.

        Raises SliceError when one does not start, or Ray does not see all of them within JOIN_SECONDS.
        """
        for slice_id in range(self.run.num_slices):
            for worker_id in range(self.run.hosts_per_slice):
                number = slice_id * self.run.hosts_per_slice + worker_id
                pod = {
                    "TPU_NAME": f"{self.run.raycluster_name}-{slice_id}",
                    "TPU_WORKER_ID": str(worker_id),
                    "TPU_WORKER_HOSTNAMES": ",".join(["localhost"] * self.run.hosts_per_slice),
                    "TPU_TOPOLOGY": self.run.topology,
                    "TPU_ACCELERATOR_TYPE": self.run.gke_tpu_env,
                }
                # The node's labels come from this process's environment, its workers' from env_vars.
                os.environ.update(pod)
                try:
                    self._add_node(
                        pod | worker_environment,
                        wait=False,
                        resources={"TPU": self.run.chips_per_host},
                        labels={"ray.io/accelerator-type": self.run.ray_accelerator_type},
                        node_ip_address=self._ip(2 + number),
                    )
                finally:
                    for key in pod:
                        del os.environ[key]
        try:
            self._cluster.wait_for_nodes(timeout=JOIN_SECONDS)
        except TimeoutError:
            raise SliceError(
                f"not all simulated hosts joined Ray within {JOIN_SECONDS} s: end what else runs here"
            ) from None

    def processes(self, mark: dict[str, str] | None = None) -> list[psutil.Process]:
        """Return every living process that was started from here, or with `mark`, however it was detached."""
        wanted = {MARK: self.id} | (mark or {})
        found = []
        for process in psutil.process_iter():
            try:
                if wanted.items() <= process.environ().items() and process.pid != os.getpid():
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def keep_logs(self, target: Path) -> None:
        """Copy Ray's own logs to `target`, for the case that they must be read."""
        shutil.rmtree(target, ignore_errors=True)
        logs = self.folder / "ray" / "session_latest" / "logs"
        if logs.is_dir():
            shutil.copytree(logs, target, symlinks=True, ignore=shutil.ignore_patterns("old"))

    def stop(self) -> None:
        """End everything that was started here and remove its files."""
        # A second look: what was just starting when the first was taken.
        while left := self.processes():
            end(left)
        shutil.rmtree(self.folder, ignore_errors=True)
        for key in self.environment:
            os.environ.pop(key, None)

    @staticmethod
    def _ip(number: int) -> str:
        """A loopback address of its own for each node, where the system has more than one: nothing listens outside."""
        return f"127.0.{1 + number // 250}.{2 + number % 250}" if sys.platform == "linux" else "127.0.0.1"


def end(processes: list[psutil.Process]) -> None:
    """End `processes`, first asking, then killing, within about STOP_SECONDS."""
    for signal_one, seconds in ((psutil.Process.terminate, STOP_SECONDS), (psutil.Process.kill, 1)):
        for process in processes:
            try:
                signal_one(process)
            except psutil.NoSuchProcess:
                continue
        _, processes = psutil.wait_procs(processes, timeout=seconds)


def free_port() -> int:
    """Return a TCP port that nothing uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
