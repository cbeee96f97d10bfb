"""An event loop that lasts over several tests."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

#: A bound on a hung test, not a measurement.
GUARD_S = 30.0


class Stage:
    """An event loop that lasts over several tests, so that they can share what runs in it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
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
