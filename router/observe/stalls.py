"""How late the event loop is: a timer that should ring every 50 ms, and by how much it did not.

Whatever keeps the loop from turning for S seconds makes the timer that fell into that time between S - 0.05 and S
late. 20 rings a second cost some 0.01 % of a busy core; an idle one is woken for them.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Self

BEAT_S = 0.05


class LoopWatch:
    """Used as a context, on a running loop. `tell` is given each delay in seconds, at least 0."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._wait(time.monotonic())
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, now_s: float) -> None:
        self._timer = self._loop.call_later(BEAT_S, self._ring, now_s + BEAT_S)

    def _ring(self, due_s: float) -> None:
        # Not the loop's own time, which stands still while the loop does.
        now_s = time.monotonic()
        self._tell(max(0.0, now_s - due_s))
        self._wait(now_s)
