"""Ctrl-C for a command that has something to show and something to clean up.

The first signal stops politely: what runs is told to stop, or, before it runs, the command is cancelled. The second
one cancels the command in any case. Cancelling is done once, so that cleaning up is not cut short by impatience.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable

#: What a shell expects of a command that a signal ended: 128 + SIGINT.
EXIT_INTERRUPTED = 130


class Stopper:
    """Where a command says how it wants to be stopped. Holds nothing else."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._main: asyncio.Task[int] | None = None
        self._signals = 0
        self._is_cancelled = False

    def on_stop(self, stop: Callable[[], None]) -> None:
        """From now on the first signal calls `stop` instead of cancelling."""
        self._stop = stop

    async def run(self, main: Callable[["Stopper"], Awaitable[int]]) -> int:
        """Run `main` under the signal handlers and return its exit code, or `EXIT_INTERRUPTED`."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._signalled)
        self._main = asyncio.ensure_future(_call(main, self))
        try:
            return await self._main
        except asyncio.CancelledError:
            if not self._is_cancelled:
                self._main.cancel()
                raise
            return EXIT_INTERRUPTED
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals == 1 and self._stop is not None:
            self._stop()
        elif not self._is_cancelled and self._main is not None:
            self._is_cancelled = True
            self._main.cancel()


async def _call(main: Callable[[Stopper], Awaitable[int]], stopper: Stopper) -> int:
    return await main(stopper)


def run(main: Callable[[Stopper], Awaitable[int]]) -> int:
    """Run a command from a plain thread of control: the exit code is the answer."""
    return asyncio.run(Stopper().run(main))
