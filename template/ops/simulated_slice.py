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
import time
from pathlib import Path

import psutil

from ops.run_env import RunEnv

MARK = "SIMULATED_SLICE_ID"  # in the environment of everything started here, so that all of it can be found again
OBJECT_STORE_BYTES = 80 * 2**20  # the least Ray accepts; nothing of the training passes through it
JOIN_SECONDS = 180
STOP_SECONDS = 10


class SimulatedSlices:
    """The hosts of `run`'s slices on this machine. Use as a context manager: leaving it ends all that it started."""

    def __init__(self, run: RunEnv) -> None:
        self.run = run
        self.id = secrets.token_hex(8)
        # Unix sockets take 107 characters, so Ray's files cannot live in the repository.
        self.folder = Path(tempfile.mkdtemp(prefix="slice-", dir="/tmp"))
        self.environment = {
            MARK: self.id,
            "RAY_TMPDIR": str(self.folder),  # also keeps another Ray's address file out of our reach, and ours out of its
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

    def start_head(self) -> None:
        """Start Ray's head, which offers no CPU for work, as on the cluster."""
        self._cluster.add_node(
            num_cpus=0,
            node_ip_address=self._ip(1),
            include_dashboard=False,
            no_monitor=True,
            object_store_memory=OBJECT_STORE_BYTES,
            dashboard_agent_listen_port=free_port(),
        )

    def start_hosts(self, worker_environment: dict[str, str]) -> None:
        """Start every host of every slice, one after the other; their Ray workers inherit `worker_environment`.

        Raises TimeoutError when Ray does not see all of them within JOIN_SECONDS.
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
                    self._cluster.add_node(
                        wait=False,
                        num_cpus=2,
                        resources={"TPU": self.run.chips_per_host},
                        labels={"ray.io/accelerator-type": self.run.ray_accelerator_type},
                        node_ip_address=self._ip(2 + number),
                        object_store_memory=OBJECT_STORE_BYTES,
                        env_vars=pod | worker_environment,
                    )
                finally:
                    for key in pod:
                        del os.environ[key]
        self._cluster.wait_for_nodes(timeout=JOIN_SECONDS)

    def processes(self) -> list[psutil.Process]:
        """Return every living process that was started from here, however it was detached."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.id and process.pid != os.getpid():
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def keep_logs(self, target: Path) -> None:
        """Copy Ray's own logs to `target`, for the case that they must be read."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(
            self.folder / "ray" / "session_latest" / "logs", target, symlinks=True, ignore=shutil.ignore_patterns("old"), dirs_exist_ok=True
        )

    def stop(self) -> None:
        """End everything that was started here, first asking, then killing, and remove its files."""
        processes = self.processes()
        for process in processes:
            try:
                process.terminate()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=STOP_SECONDS)
        deadline = time.monotonic() + STOP_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(left, timeout=1)
        shutil.rmtree(self.folder, ignore_errors=True)
        for key in self.environment:
            os.environ.pop(key, None)

    @staticmethod
    def _ip(number: int) -> str:
        """A loopback address of its own for each node, where the system has more than one: nothing listens outside."""
        return f"127.0.{1 + number // 250}.{2 + number % 250}" if sys.platform == "linux" else "127.0.0.1"


def free_port() -> int:
    """Return a TCP port that nothing uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
