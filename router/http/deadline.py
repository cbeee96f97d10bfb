"""The one deadline that a client's connection has at a time, and what is done when it comes."""

import asyncio
from collections.abc import Callable

from router.alarm import NEVER, Alarm


class Deadline(Alarm):
    """When it comes, `act` of the last `set` is called, once."""

    __slots__ = ("_act",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._act: Callable[[], None] | None = None

    def set(self, within_s: float, act: Callable[[], None]) -> None:
        """In place of the one before."""
        self.deadline_s = deadline_s = self.loop.time() + within_s
        self._act = act
        if deadline_s < self._rings_at_s:
            self._ring_at(deadline_s)

    def stop(self) -> None:
        """There is none any more, and no timer."""
        self._act = None
        self._stop_timer()

    def _came(self) -> None:
        act, self.deadline_s = self._act, NEVER
        if act is not None:
            act()
