"""The one deadline that a connection has at a time, on a timer that is seldom touched.

A deadline is set for every request and hardly ever comes. So setting one only notes it, unless it comes before the
timer rings; a timer that rings too early is set again for what is left.
"""

import asyncio
from collections.abc import Callable

#: Where there is no deadline.
NEVER = float("inf")
#: A deadline so near is here: event loops count in milliseconds.
TICK_S = 0.001


class Deadline:
    """When it comes, `act` of the last `set` is called, once."""

    __slots__ = ("_act", "_loop", "_rings_at_s", "_timer", "due_s")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: When it comes. Set to `NEVER`, there is none.
        self.due_s = NEVER
        self._act: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at_s = NEVER

    def set(self, within_s: float, act: Callable[[], None]) -> None:
        """In place of the one before."""
        self.due_s = due_s = self._loop.time() + within_s
        self._act = act
        if due_s < self._rings_at_s:
            self._set_timer(due_s)

    def stop(self) -> None:
        """There is none any more, and no timer."""
        self.due_s = NEVER
        self._act = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._rings_at_s = NEVER

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._ring)
        self._rings_at_s = at_s

    def _ring(self) -> None:
        self._timer = None
        self._rings_at_s = NEVER
        if self.due_s == NEVER:
            return
        if self.due_s - self._loop.time() > TICK_S:
            self._set_timer(self.due_s)
            return
        act, self.due_s = self._act, NEVER
        if act is not None:
            act()
