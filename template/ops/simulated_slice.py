"""TPU slices without a TPU: a local Ray whose nodes look to Ray like the hosts of GKE TPU slices.

Each simulated host is a raylet with the environment that GKE's device plugin and KubeRay's TPU webhook give a TPU pod.
Ray derives its slice labels and the slice's head resource from that environment, exactly as it does on the slice.
"""

import collections
import ctypes
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from ops.run_env import RunEnv
from ops.terminal import UserError

OBJECT_STORE_BYTES = 80 * 2**20  # the least Ray accepts; nothing of the training passes through it
JOIN_SECONDS = 180
STOP_SECONDS = 10
ATTEMPTS = 3  # to start a node: Ray gives it 30 s, whatever else the machine is doing


class SliceError(UserError):
    """The simulated hosts did not come up; the message says what to do."""


class SimulatedSlices:
    """The hosts of `run`'s slices on this machine. Use as a context manager: leaving it ends all that it started."""

    def __init__(self, run: RunEnv) -> None:
        self.run = run
        self._gcs_port = free_port()
        self._hosts: collections.defaultdict[int, list[Any]] = collections.defaultdict(list)  # nodes by slice
        self._seen: set[psutil.Process] = set()
        self._looking = threading.Lock()  # guards _seen
        self._adding = threading.Lock()  # held while a node starts
        self._stopping = threading.Event()
        adopt_orphans()
        # Unix sockets take 107 characters, so Ray's files cannot live in the repository.
        self.folder = Path(tempfile.mkdtemp(prefix="slice-", dir="/tmp"))
        self.environment = {
            # Also keeps the address files of this Ray and of another one apart.
            "RAY_TMPDIR": str(self.folder),
            # Said outright: Ray otherwise turns tokens on or off by what an earlier Ray left in the home folder.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_worker_niceness": "0",  # workers are what this machine is for just now
            "RAY_prestart_worker_first_driver": "0",  # no idle workers on a machine this small
            # Ray shows the lines of libtpu's logs as its own: those of a compile beside it would come up here.
            "TPU_LOG_DIR": str(self.folder / "tpu_logs"),
            # glibc otherwise keeps up to 8 heaps a core in each of some 25 processes.
            "MALLOC_ARENA_MAX": "2",
        }
        (self.folder / "tpu_logs").mkdir()
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
        return str(self._cluster.address)

    def _add_node(self, env_vars: dict[str, str], **arguments: Any) -> Any:
        """Start one node, again if Ray finds it too slow, and return Ray's handle of it."""
        # Said outright: what runs in a node could otherwise take another Ray on this machine for its own.
        env_vars = env_vars | {"RAY_ADDRESS": f"{self._ip(1)}:{self._gcs_port}"}
        for _ in range(ATTEMPTS):
            with self._adding:
                if self._stopping.is_set():
                    raise SliceError("the rehearsal is ending")
                others = set(self.processes())
                try:
                    return self._cluster.add_node(
                        env_vars=env_vars, object_store_memory=OBJECT_STORE_BYTES, **arguments
                    )
                except Exception as error:  # Ray raises a bare Exception for a slow node
                    # The trainer, which may have started meanwhile, has a session of its own.
                    end([process for process in self.processes() if process not in others and in_our_session(process)])
                    reason = error
        raise SliceError(
            f"a simulated host did not start in {ATTEMPTS} attempts of 30 s each (load {os.getloadavg()[0]:.0f} on "
            f"{os.cpu_count()} cores): end what else runs here, then rehearse again. Ray says: {reason}"
        )

    def start_head(self) -> None:
        """Start Ray's head, which offers no CPU for work, as on the cluster. Raises SliceError."""
        self._add_node(
            {},
            num_cpus=0,
            node_ip_address=self._ip(1),
            gcs_server_port=self._gcs_port,
            include_dashboard=False,
            no_monitor=True,
            dashboard_agent_listen_port=free_port(),
        )

    def start_hosts(self, worker_environment: dict[str, str]) -> None:
        """Start every host of every slice, one after the other; their Ray workers inherit `worker_environment`.

        Raises SliceError when one does not start, or Ray does not see all of them within JOIN_SECONDS.
        """
        for slice_id in range(self.run.num_slices):
            self.start_slice(slice_id, worker_environment)
        try:
            self._cluster.wait_for_nodes(timeout=JOIN_SECONDS)
        except TimeoutError:
            raise SliceError(
                f"not all simulated hosts joined Ray within {JOIN_SECONDS} s: end what else runs here"
            ) from None

    def start_slice(self, slice_id: int, worker_environment: dict[str, str]) -> None:
        """Start the hosts of one slice, without a wait for Ray to see them. Raises SliceError."""
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
                node = self._add_node(
                    pod | worker_environment,
                    wait=False,
                    num_cpus=1,  # the share that Ray's slice reservation asks of each host
                    resources={"TPU": self.run.chips_per_host},
                    labels={"ray.io/accelerator-type": self.run.ray_accelerator_type},
                    node_ip_address=self._ip(2 + number),
                )
                self._hosts[slice_id].append(node)
            finally:
                for key in pod:
                    del os.environ[key]

    def lose_slice(self, slice_id: int) -> None:
        """Kill all hosts of one slice outright, with their workers."""
        for node in self._hosts.pop(slice_id):
            self._cluster.remove_node(node, allow_graceful=False)

    def processes(self) -> list[psutil.Process]:
        """Return every living process that was started from here, however it was detached.

        Ray's processes overwrite their names and environments, so descent is the only mark that stays.
        """
        with self._looking:
            self._seen.update(psutil.Process().children(recursive=True))
            self._seen = {process for process in self._seen if is_alive(process)}
            return list(self._seen)

    def keep_logs(self, target: Path) -> None:
        """Copy Ray's own logs to `target`, for the case that they must be read."""
        shutil.rmtree(target, ignore_errors=True)
        logs = self.folder / "ray" / "session_latest" / "logs"
        if logs.is_dir():
            shutil.copytree(logs, target, symlinks=True, ignore=shutil.ignore_patterns("old"))

    def stop(self) -> None:
        """End everything that was started here and remove its files."""
        self._stopping.set()
        deadline = time.monotonic() + 6 * STOP_SECONDS
        # Again and again: a host may be half-way up, and what it starts next must end too.
        while (left := self.processes()) or self._adding.locked():
            end(left)
            if time.monotonic() > deadline:
                names = ", ".join(f"{process.pid}" for process in left)
                raise SliceError(f"these processes do not end, not even killed: {names}. Look at them with ps")
            time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)
        for key in self.environment:
            os.environ.pop(key, None)

    @staticmethod
    def _ip(number: int) -> str:
        """A loopback address of its own for each node, where the system has more than one: nothing listens outside."""
        return f"127.0.{1 + number // 250}.{2 + number % 250}" if sys.platform == "linux" else "127.0.0.1"


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent has died, where the system can: Linux."""
    if sys.platform == "linux":
        set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER, linux/prctl.h
        ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0)


def is_alive(process: psutil.Process) -> bool:
    """True for a process that still runs; a zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def in_our_session(process: psutil.Process) -> bool:
    """True for a process that was started without a session of its own."""
    try:
        return os.getsid(process.pid) == os.getsid(0)
    except ProcessLookupError:
        return False


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
