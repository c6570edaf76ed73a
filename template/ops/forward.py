"""A port of the Ray head on this machine: `kubectl port-forward`, started again whenever it drops."""

import re
import shutil
import subprocess
import threading
import time

from ops.kube import Kube
from ops.terminal import UserError

DASHBOARD_PORT = 8265
FIRST_SECONDS = 30  # for the first connection
AGAIN_SECONDS = 2  # between attempts, once it has worked


class Forward:
    """http://127.0.0.1:<port> is the dashboard of the head of `cluster`. Use as a context manager.

    Nothing listens beyond this machine. The port stays the same when the connection is made again.
    """

    def __init__(self, kube: Kube, cluster: str, port: int = 0) -> None:
        self._kube = kube
        self._service = f"service/{cluster}-head-svc"
        self.port = port  # 0: a free one
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # guards _process against _ended
        self._ended = threading.Event()
        self._up = threading.Event()
        self._said = ""

    @property
    def address(self) -> str:
        """The dashboard's URL on this machine."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Forward":
        if not shutil.which("kubectl"):
            raise UserError("kubectl is not installed: gcloud components install kubectl")
        threading.Thread(target=self._keep, daemon=True).start()
        if not self._up.wait(FIRST_SECONDS):
            self.close()
            raise UserError(
                f"no connection to {self._service} within {FIRST_SECONDS} s ({self._said or 'kubectl says nothing'})",
                "make doctor says what is wrong",
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End kubectl, and nothing else."""
        with self._lock:
            self._ended.set()
            process = self._process
        if process and process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()

    def _keep(self) -> None:
        while not self._ended.is_set():
            with self._lock:
                if self._ended.is_set():
                    return
                self._process = subprocess.Popen(
                    self._kube.command("port-forward", self._service, f"{self.port or ''}:{DASHBOARD_PORT}"),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the command, which then ends this
                )
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if found := re.match(r"Forwarding from 127\.0\.0\.1:(\d+)", line):
                    self.port = int(found[1])
                    self._up.set()
                elif not line.startswith(("Forwarding", "Handling")):
                    self._said = line.strip().removeprefix("error: ") or self._said
                    # kubectl goes on after this, but no longer forwards anything.
                    if "lost connection to pod" in line:
                        self._process.terminate()
            self._process.wait()
            time.sleep(AGAIN_SECONDS)
