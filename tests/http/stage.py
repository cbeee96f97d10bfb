"""An event loop that lasts over several tests and keeps the signal handlers of the servers in it to itself."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

import uvloop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: A bound on a hung test, not a measurement.
GUARD_S = 30.0


class Loop(uvloop.Loop):
    """An event loop that keeps signal handlers instead of setting them: several servers can live in it."""

    def __init__(self) -> None:
        super().__init__()
        self.signal_handlers: dict[int, Callable[[], object]] = {}

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        self.signal_handlers[sig] = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self.signal_handlers.pop(sig, None) is not None


class Stage:
    """An event loop that lasts over several tests, so that they can share what runs in it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=Loop)
        self._open = contextlib.AsyncExitStack()

    def run(self, test: Coroutine[Any, Any, T]) -> T:
        """Run the body of a test, bounded."""

        async def bounded() -> T:
            async with asyncio.timeout(GUARD_S):
                return await test

        return self._runner.run(bounded())

    def start(self, resource: contextlib.AbstractAsyncContextManager[T]) -> T:
        """Enter `resource`; it ends with the stage."""
        return self.run(self._open.enter_async_context(resource))

    def close(self) -> None:
        try:
            self.run(self._open.aclose())
        finally:
            self._runner.close()
