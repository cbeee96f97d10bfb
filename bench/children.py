"""Processes that a measurement starts, and how they end: by process id, on every way out.

Rules: a child's output goes to a file in the measurement's own folder; what a child started itself is looked up before
it is killed, so that nothing outlives the run; nothing is ever ended by name.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.yardstick.cost import family

__all__ = ["Child", "ChildFailed", "answers", "free_port", "listens", "running", "stop_on_sigterm"]

_STOP_MAX_S = 15.0
_LOOK_INTERVAL_S = 0.02


class ChildFailed(Exception):
    """A process did not start, or ended too early. The text has the last lines of its output."""


class Child:
    """A running process. `running` owns it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def failed(self, what: str) -> ChildFailed:
        """The exception that says so, with what the process wrote last."""
        last = "\n".join(self.output.splitlines()[-12:])
        return ChildFailed(f"{self.name} {what}; its last output:\n{last}")

    def wait_for(self, is_there: Callable[[], object], what: str, limit_s: float) -> None:
        """Until `is_there()` is true. Raises: `ChildFailed` after `limit_s`, or as soon as the process has ended."""
        until_s = time.monotonic() + limit_s
        while not is_there():
            if self.has_ended:
                raise self.failed(f"ended with code {self._process.returncode}")
            if time.monotonic() > until_s:
                raise self.failed(f"was not {what} within {limit_s:g} s")
            time.sleep(_LOOK_INTERVAL_S)

    def kill(self) -> None:
        """As `kill -9`: nothing is said to anyone."""
        self._process.kill()
        self._process.wait()

    def stop(self, asking: signal.Signals) -> None:
        """Ask, wait, kill what is left of it and of its own children. Idempotent."""
        descendants = [pid for pid in family(self.pid) if pid != self.pid] if not self.has_ended else []
        if not self.has_ended:
            self._process.send_signal(asking)
            try:
                self._process.wait(_STOP_MAX_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                for pid in descendants:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def running(
    name: str,
    command: Sequence[str],
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    asking: signal.Signals = signal.SIGTERM,
) -> Iterator[Child]:
    """`command` as a child until the block ends, its output in `folder/name.log`. Raises: `OSError` where it cannot
    be started at all."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=cwd,
        )
    child = Child(name, process, log)
    try:
        yield child
    finally:
        child.stop(asking)


def free_port() -> int:
    """A port that nobody listens on now, for programs that cannot be told to choose one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str, status: int = 200) -> bool:
    """Whether a GET of `url` has `status` within a second."""
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == status)
    except urllib.error.HTTPError as error:
        return error.code == status
    except OSError:
        return False


def listens(port: int) -> bool:
    """Whether 127.0.0.1:`port` takes a connection."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that its children are stopped."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
