"""An event loop whose time is the test's: it jumps to the next timer, so nothing is waited for."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while there is work, and jumps to the next timer when there is none."""

    def __init__(self) -> None:
        super().__init__(_NoWait(self))
        self.time_s = 1_000.0

    def time(self) -> float:
        return self.time_s

    # The clock of the router.
    now_s = unix_s = time


class _NoWait(selectors.DefaultSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout:
            self._loop.time_s += timeout
        return super().select(0)


def run_on(loop: JumpingLoop, test: Coroutine[Any, Any, T]) -> T:
    """Run the body of a test on `loop`."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(test)
