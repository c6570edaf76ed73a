"""Ray's job API at the head: submit a run, follow its log through dropped connections, stop it."""

import asyncio
import contextlib
import logging
import os
import queue
import shlex
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from ops import terminal
from ops.terminal import UserError

CALL_SECONDS = 30  # for one call to the head
QUIET_SECONDS = 20  # of a silent log, after which the head is asked whether it is still there
RETRY_SECONDS = 2
PATIENCE_MINUTES = 10.0  # without any connection, while a run is followed
ANSWER_MINUTES = 2.0  # without any connection, for a single question
STOP_SECONDS = 120


class Lost(Exception):
    """The connection to the head is gone; the run is not."""


class Gone(UserError):
    """The head answers, but does not know the run."""


class Jobs:
    """The jobs of one Ray head.

    `address` is its dashboard's URL, `token` what it asks for, if anything. A single question is asked again for
    `answer_minutes` while there is no connection.
    """

    def __init__(self, address: str, token: str | None = None, answer_minutes: float = ANSWER_MINUTES) -> None:
        self.address = address
        self._answer_minutes = answer_minutes
        logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)  # it tells of every connection
        # A proxy of the user's network is no way to a port of this machine.
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(
            filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1"])
        )
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client: JobSubmissionClient | None = None

    def _call[T](self, function: Callable[[JobSubmissionClient], T]) -> T:
        """Call the head. Raises Lost when it does not answer, Gone for an unknown run, UserError when it refuses."""

        def call() -> T:
            if self._client is None:
                # Connecting asks the head for its version.
                self._client = JobSubmissionClient(self.address, headers=dict(self._headers))
            return function(self._client)

        try:
            return within(CALL_SECONDS, call)
        except (requests.RequestException, OSError, TimeoutError) as problem:
            raise Lost(str(problem)) from None
        except AuthenticationError:
            raise UserError("the Ray head refuses the token", "make doctor compares it") from None
        except RuntimeError as problem:
            said = str(problem)
            if "status code 404" in said or "does not exist" in said:
                raise Gone(
                    "Ray's head does not know this run any more: it was restarted. make resume goes on"
                ) from None
            if "status code 5" in said or "Failed to connect" in said:
                raise Lost(said) from None
            raise UserError(f"Ray's head says: {said}") from None

    def _patiently[T](self, function: Callable[[JobSubmissionClient], T]) -> T:
        """Call the head, and again while the connection is gone. Raises UserError after the minutes for an answer."""
        deadline = time.monotonic() + self._answer_minutes * 60
        told = False
        while True:
            try:
                return self._call(function)
            except Lost as problem:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"the Ray head does not answer ({problem})", "make doctor checks the way to it"
                    ) from None
                if not told:
                    terminal.notice(f"no connection to the Ray head; trying for {self._answer_minutes:g} min")
                    told = True
                time.sleep(RETRY_SECONDS)

    def every(self) -> list[JobDetails]:
        """Return every job that the head knows, oldest first. Raises UserError."""
        found = self._patiently(lambda client: client.list_jobs())
        return sorted(found, key=lambda job: job.start_time or 0)

    def running(self) -> JobDetails | None:
        """Return the job that is not over yet, None without one."""
        return next((job for job in self.every() if not JobStatus(job.status).is_terminal()), None)

    def newest(self) -> JobDetails | None:
        """Return the run that was submitted last, running or over, None without one."""
        return next((job for job in reversed(self.every()) if job.submission_id), None)

    def details(self, submission_id: str) -> JobDetails:
        """Return one run. Raises UserError."""
        return self._patiently(lambda client: client.get_job_info(submission_id))

    def submit(self, name: str, entrypoint: list[str], metadata: dict[str, str] | None = None) -> str:
        """Start a run; return its submission id, `name` with a number.

        Never starts it twice, also when the connection drops between question and answer. Raises UserError while
        another job runs: two at once would fight over the hosts and the checkpoints.
        """
        jobs = self.every()
        busy = next((job for job in jobs if not JobStatus(job.status).is_terminal()), None)
        if busy:
            raise UserError(f"{label(busy)} is running: make status follows it, make stop ends it")
        taken = [job.submission_id for job in jobs if job.submission_id]
        number = 1 + max((int(t.rpartition("-")[2]) for t in taken if t.startswith(name) and numbered(t)), default=0)
        # Ray refuses an id that exists, so of two people only one gets it; the mark tells which.
        submission_id, mark = f"{name}-{number}", uuid.uuid4().hex

        def ask(client: JobSubmissionClient) -> str:
            try:
                return str(
                    client.submit_job(
                        entrypoint=shlex.join(entrypoint),
                        submission_id=submission_id,
                        metadata={**(metadata or {}), "submitted-by": mark},
                    )
                )
            except RuntimeError:
                details = None
                with contextlib.suppress(RuntimeError):
                    details = client.get_job_info(submission_id)
                if details is None:
                    raise
                if (details.metadata or {}).get("submitted-by") == mark:
                    return submission_id
                raise UserError(f"{submission_id} was started just now by someone else: make status") from None

        return self._patiently(ask)

    def stop(self, job: JobDetails) -> JobDetails:
        """Stop a run and wait until it is over; return how it ended. Raises UserError when it does not end."""
        submission_id = job.submission_id
        if submission_id is None:
            raise UserError(f"{label(job)} was started on the head itself, not by make: end it there")
        self._patiently(lambda client: client.stop_job(submission_id))
        deadline = time.monotonic() + STOP_SECONDS
        while True:
            details = self.details(submission_id)
            if JobStatus(details.status).is_terminal():
                return details
            if time.monotonic() > deadline:
                raise UserError(
                    f"{submission_id} does not end within {STOP_SECONDS} s: make stop ARGS=--cluster ends it"
                )
            time.sleep(RETRY_SECONDS)

    def follow(
        self, submission_id: str, on_line: Callable[[str], None], on_lost: Callable[[], None] = lambda: None
    ) -> JobDetails:
        """Hand every line of the run's log to `on_line`, each once, until the run is over; return how it ended.

        A dropped connection is made again, and the log goes on where it was. `on_lost` hears of it, and may raise to
        end the wait. Raises UserError without a connection for PATIENCE_MINUTES, Gone when the head has forgotten the
        run.
        """
        log = Log(on_line)
        lost_since: float | None = None
        while True:
            try:
                before = log.read
                self._tail(submission_id, log)
                details = self._call(lambda client: client.get_job_info(submission_id))
                if JobStatus(details.status).is_terminal():
                    log.close()
                    return details
                lost_since = None
            except Lost as problem:
                now = time.monotonic()
                lost_since = now if lost_since is None or log.read > before else lost_since
                if now - lost_since > PATIENCE_MINUTES * 60:
                    raise UserError(
                        f"no connection to the Ray head for {PATIENCE_MINUTES:g} min ({problem}). The run goes on: "
                        "make status follows it"
                    ) from None
                on_lost()
            time.sleep(RETRY_SECONDS)

    def log(self, submission_id: str) -> str:
        """Return the run's whole log so far. Raises UserError."""
        return str(self._patiently(lambda client: client.get_job_logs(submission_id)))

    def host_log(self, ip: str, job_id: str, lines: int) -> str:
        """Return the last `lines` lines of each worker process that the job `job_id` has on the host with this address.

        Raises UserError.
        """
        found = self._get("/api/v0/logs", node_ip=ip, glob=f"worker-*-{job_id}-*")["data"]["result"]
        parts = []
        for name in sorted(name for names in found.values() for name in names):
            text = self._get("/api/v0/logs/file", node_ip=ip, filename=name, lines=str(lines), as_json=False)
            # Each piece of the stream starts with a mark, 1 for text.
            parts.append(f"==> {name}\n{text.removeprefix('1')}")
        return "\n".join(parts)

    def _get(self, path: str, as_json: bool = True, **query: str) -> Any:
        try:
            answer = requests.get(self.address + path, params=query, headers=self._headers, timeout=CALL_SECONDS)
        except requests.RequestException as problem:
            raise UserError(f"the Ray head does not answer: {problem}") from None
        if answer.status_code != 200:
            raise UserError(f"Ray's head says: {answer.text[:300]}")
        return answer.json() if as_json else answer.text

    def _tail(self, submission_id: str, log: "Log") -> None:
        """Read the log from its start, which is how Ray sends it, until the head closes it. Raises Lost, Gone."""
        self._call(lambda client: client.get_job_info(submission_id))
        chunks: queue.Queue[str | BaseException | None] = queue.Queue()
        done = threading.Event()

        async def read() -> None:
            client = self._client
            assert client is not None
            stream = client.tail_job_logs(submission_id).__aiter__()
            task: asyncio.Task[str] | None = None
            while not done.is_set():
                task = task or asyncio.ensure_future(anext(stream))
                await asyncio.wait({task}, timeout=1)
                if task.done():
                    try:
                        chunks.put(task.result())
                    except StopAsyncIteration:
                        return
                    task = None
            if task:
                task.cancel()

        def run() -> None:
            try:
                asyncio.run(read())
                chunks.put(None)
            except BaseException as problem:
                chunks.put(problem)

        threading.Thread(target=run, daemon=True).start()
        log.rewind()
        try:
            while True:
                try:
                    chunk = chunks.get(timeout=QUIET_SECONDS)
                except queue.Empty:
                    # A connection that nobody closed, as after a sleep of this machine, stays silent for ever.
                    details = self._call(lambda client: client.get_job_info(submission_id))
                    if JobStatus(details.status).is_terminal() and chunks.empty():
                        return
                    continue
                if chunk is None:
                    return
                if isinstance(chunk, BaseException):
                    raise Lost(str(chunk))
                log.take(chunk)
        finally:
            done.set()


class Log:
    """A log that may be sent again from its start: passes on what is new, line by line."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._position = 0  # in what is being sent now, in characters
        self._rest = ""
        self.read = 0  # characters passed on, or kept as the start of a line

    def rewind(self) -> None:
        """The log is about to be sent from its start again."""
        self._position = 0

    def take(self, text: str) -> None:
        """Take the next piece of what is sent."""
        new = text[max(0, self.read - self._position) :]
        self._position += len(text)
        self.read = max(self.read, self._position)
        *lines, self._rest = (self._rest + new).split("\n")
        for line in lines:
            self._on_line(line)

    def close(self) -> None:
        """Pass on a last line that does not end."""
        if self._rest:
            self._on_line(self._rest)
        self._rest = ""


def within[T](seconds: float, function: Callable[[], T]) -> T:
    """Return what `function` returns. Raises TimeoutError after `seconds`: Ray's client itself would wait for ever."""
    answer: queue.Queue[tuple[bool, Any]] = queue.Queue()

    def call() -> None:
        try:
            answer.put((True, function()))
        except BaseException as problem:
            answer.put((False, problem))

    threading.Thread(target=call, daemon=True).start()
    try:
        worked, value = answer.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if not worked:
        raise value
    return value  # type: ignore[no-any-return]


def numbered(submission_id: str) -> bool:
    """True when the id ends in a number."""
    return submission_id.rpartition("-")[2].isdecimal()


def label(job: JobDetails) -> str:
    """Return the name by which people know a job."""
    return str(job.submission_id or f"job {job.job_id}")


def exit_code(details: JobDetails) -> int:
    """Return the job's own exit code; 1 where it ended without one, as when it was stopped."""
    if JobStatus(details.status) == JobStatus.SUCCEEDED:
        return 0
    return int(details.driver_exit_code or 1)
