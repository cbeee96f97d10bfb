"""A program started for a test: its own process group, its output in a file, and an end on every path.

Knows nothing of what the program is.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import httpx

T = TypeVar("T")

#: Between two looks at something that cannot tell us when it changes.
POLL_S = 0.05
#: From SIGTERM to SIGKILL.
STOP_GRACE_S = 15.0


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago, chosen by the kernel."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until(read: Callable[[], T], is_wanted: Callable[[T], bool], *, within_s: float, what: str) -> T:
    """Read until the value is wanted, and return it.

    Raises: AssertionError with the last value, when `within_s` is over.
    """
    ends_at_s = time.monotonic() + within_s
    while not is_wanted(value := read()):
        assert time.monotonic() < ends_at_s, f"{what}: still {value!r} after {within_s:g} s"
        time.sleep(POLL_S)
    return value


class Program:
    """One running program and all of its children.

    The kernel kills it when the tests themselves are killed; its children are then its own to end, as vLLM's are.
    """

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until_it_serves(self, url: str, *, within_s: float) -> None:
        """Return once `url` answers 200. Raises: AssertionError with the end of the log."""

        def state() -> str:
            if not self.is_running:
                return f"ended with {self._process.returncode}"
            try:
                return str(httpx.get(url, timeout=5.0, trust_env=False).status_code)
            except httpx.HTTPError as error:
                return type(error).__name__

        try:
            last = wait_until(state, lambda seen: seen == "200" or "ended" in seen, within_s=within_s, what=self.name)
            assert last == "200", f"{self.name} {last}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}:\n{self.log_tail()}") from None

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL for the whole group, at once. Idempotent."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for whoever of the group is left. Idempotent."""
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def _signal(self, number: signal.Signals) -> None:
        # The group outlives its leader where a child does, so it is asked for even when the leader has ended.
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass
