"""One deadline on a timer that is seldom touched.

A deadline is set for every request, or every piece of an answer, and hardly ever comes. So setting one only notes it,
unless it comes before the timer rings; a timer that rings too early is set again for what is left.
"""

import asyncio

#: Where there is no deadline.
NEVER = float("inf")
#: A deadline so near is here: event loops count in milliseconds.
TICK_S = 0.001


class Alarm:
    """For whoever has one deadline at a time: it notes `deadline_s`, calls `_ring_at` where that is before
    `_rings_at_s`, and says in `_came` what happens then."""

    __slots__ = ("_rings_at_s", "_timer", "deadline_s", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        #: On the loop's clock. Set to `NEVER`, there is none.
        self.deadline_s = NEVER
        self._rings_at_s = NEVER
        self._timer: asyncio.TimerHandle | None = None

    def _came(self) -> None:
        """The deadline is here. It stays noted."""
        raise NotImplementedError

    def _ring_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at_s = at_s
        self._timer = self.loop.call_at(at_s, self._ring)

    def _stop_timer(self) -> None:
        """There is no deadline any more, and no timer."""
        self.deadline_s = self._rings_at_s = NEVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer, self._rings_at_s = None, NEVER
        if self.deadline_s == NEVER:
            return
        if self.deadline_s - self.loop.time() > TICK_S:
            self._ring_at(self.deadline_s)
        else:
            self._came()
