"""What people see: notices, one progress line, errors and a verdict. Plain lines where there is no terminal."""

import dataclasses
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from ops.run_env import RunEnvError

console = Console(highlight=False, soft_wrap=True)
PLAIN_INTERVAL_SECONDS = 15  # between progress lines where they cannot overwrite each other, as in CI


class UserError(Exception):
    """Something that the user can put right: `what` is wrong and the `next` step, where `what` does not say it."""

    def __init__(self, what: str, next_step: str = "") -> None:
        super().__init__(f"{what}: {next_step}" if next_step else what)
        self.what = what
        self.next = next_step


def run(main: Callable[[], int]) -> NoReturn:
    """Run a command and exit with its code; 1 with one line for what the user can put right, 130 after Ctrl-C."""
    # A polite kill and a closed terminal clean up like Ctrl-C, which a shell makes its background jobs ignore.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        code = main()
    except (UserError, RunEnvError) as problem:
        error(str(problem))
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def notice(text: str) -> None:
    """Print something the reader should know, on lines of its own."""
    console.print(Text(f"note: {text}", style="yellow"))


def error(text: str) -> None:
    """Print what went wrong and what to do, to stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(f"error: {text}", style="bold red"))


class Progress:
    """One line that is always current: elapsed seconds and the latest text. Use as a context manager."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._status = console.status("") if console.is_terminal else None
        self._last_phase = ""
        self._last_printed = 0.0

    def __enter__(self) -> "Progress":
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def update(self, phase: str, detail: str = "") -> None:
        """Show `phase` and `detail`; without a terminal only on a new phase or every PLAIN_INTERVAL_SECONDS."""
        now = time.monotonic()
        line = f"{now - self.started:5.0f} s  {phase}" + (f"  {detail}" if detail else "")
        if self._status:
            self._status.update(Text(line))
        elif phase != self._last_phase or now - self._last_printed > PLAIN_INTERVAL_SECONDS:
            print(line, flush=True)
            self._last_printed = now
        self._last_phase = phase


@dataclasses.dataclass(frozen=True)
class Check:
    """One point of a verdict: what was checked, whether it holds, and what was seen."""

    name: str
    passed: bool
    seen: str


def verdict(title: str, checks: list[Check]) -> bool:
    """Print the checks, a line each, and return whether all of them hold."""
    console.print(Text(title, style="bold"))
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = Text("pass", style="green") if check.passed else Text("FAIL", style="bold red")
        console.print(" ", mark, Text(f"{check.name:<{width}}  {check.seen}"))
    sys.stdout.flush()
    return all(check.passed for check in checks)
