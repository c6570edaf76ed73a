"""For the tests of the control plane: a real Ray head, a way to it that can be cut, and a program in place of a run."""

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

START_SECONDS = 400  # beside a rehearsal on two cores

# Prints what MaxText prints of each step. `hold=FILE` waits in the middle for the file, `code=N` is the exit code.
PROGRAM = """
import os, sys, time
parent = os.getppid()
given = dict(word.split("=", 1) for word in sys.argv[1:])
steps = int(given.get("steps", 40))
print("host 0: slice-0, TPU_WORKER_ID 0", flush=True)
for step in range(steps):
    if step == steps // 2 and "hold" in given:
        while not os.path.exists(given["hold"]):
            time.sleep(0.1)
            if os.getppid() != parent:
                sys.exit("the Ray that started this is gone")
    print(f"completed step: {step}, seconds: 1.100, TFLOP/s/device: 459.0, Tokens/s/device: 3725.100, "
          f"total_weights: 65536, loss: {10 - step / 100:.3f}, lm_loss: 1.0, perplexity: 2.0", flush=True)
print("the last line has no end", end="", flush=True)
sys.exit(int(given.get("code", 0)))
"""


def free_port() -> int:
    """Return a TCP port that nothing uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RayHead:
    """`ray start --head` with token authentication and no CPUs for work, as on the cluster, in a session of its own."""

    def __init__(self, python: Path) -> None:
        # Unix sockets take 107 characters: pytest's own folders are too deep for them.
        self._folder = tempfile.TemporaryDirectory(prefix="head-", dir="/tmp", ignore_cleanup_errors=True)
        self.port, self.token = free_port(), secrets.token_hex(16)
        self.address = f"http://127.0.0.1:{self.port}"
        self._log = Path(self._folder.name, "start.log")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        command = [
            "start", "--head", "--block", f"--port={free_port()}", "--node-ip-address=127.0.0.1", "--num-cpus=0",
            f"--dashboard-port={self.port}", f"--dashboard-agent-listen-port={free_port()}",
            f"--ray-client-server-port={free_port()}", "--object-store-memory=80000000", "--disable-usage-stats",
        ]  # fmt: skip
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python.parent / "ray", *command, f"--temp-dir={self._folder.name}"],
                env=environment
                | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_TMPDIR": self._folder.name},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "RayHead":
        deadline = time.monotonic() + START_SECONDS
        request = urllib.request.Request(f"{self.address}/api/jobs/", headers={"Authorization": f"Bearer {self.token}"})
        while True:
            try:
                with urllib.request.urlopen(request, timeout=5):
                    return self
            except (urllib.error.URLError, OSError) as problem:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise AssertionError(f"no Ray head: {problem}\n{self._log.read_text()[-2000:]}") from None
            time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    def stop(self) -> None:
        """End it and all that it started: it leads a session in which nothing else is."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(5)  # on a busy machine it takes its time; nothing of it is worth waiting for
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Way:
    """A TCP port that leads to another one, until it is cut; `open` restores it on the same port."""

    def __init__(self, target: int, port: int = 0) -> None:
        self._target = target
        self.port = port or free_port()
        self._listener: socket.socket | None = None
        self._sockets: list[socket.socket] = []
        self.connections = 0
        self.open()

    def open(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen()
        self._listener = listener
        threading.Thread(target=self._serve, args=[listener], daemon=True).start()

    def cut(self) -> None:
        """Drop every connection, and take no new one."""
        assert self._listener is not None
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._listener = None
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self.connections += 1
            self._sockets += [near, far]
            threading.Thread(target=_pump, args=[near, far], daemon=True).start()


def _pump(near: socket.socket, far: socket.socket) -> None:
    with near, far, contextlib.suppress(OSError, ValueError):
        while True:
            for readable in select.select([near, far], [], [])[0]:
                data = readable.recv(65536)
                if not data:
                    return
                (far if readable is near else near).sendall(data)
