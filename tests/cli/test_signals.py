"""Ctrl-C stops politely once, firmly twice, and cleaning up is never cut short."""

import asyncio
import os
import signal

from router.cli._signals import EXIT_INTERRUPTED, Stopper, run


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


async def _turns(count: int = 20) -> None:
    """Let the loop see the signals that were sent."""
    for _ in range(count):
        await asyncio.sleep(0.001)


def test_the_first_signal_asks_and_the_command_ends_in_its_own_way() -> None:
    asked = asyncio.Event()

    async def main(stopper: Stopper) -> int:
        stopper.on_stop(asked.set)
        _interrupt()
        await asked.wait()
        return 7

    assert run(main) == 7


def test_a_signal_before_anything_runs_cancels_the_command() -> None:
    async def main(_: Stopper) -> int:
        _interrupt()
        await asyncio.Event().wait()
        return 0

    assert run(main) == EXIT_INTERRUPTED


def test_a_second_signal_cancels_and_a_third_does_not_cut_the_cleaning_short() -> None:
    asked: list[str] = []

    async def main(stopper: Stopper) -> int:
        stopper.on_stop(lambda: asked.append("stop"))
        try:
            _interrupt()
            await _turns()
            _interrupt()
            await asyncio.Event().wait()
        finally:
            _interrupt()
            await _turns()
            asked.append("clean")
        return 0

    assert run(main) == EXIT_INTERRUPTED
    assert asked == ["stop", "clean"]


def test_the_handlers_are_gone_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def main(_: Stopper) -> int:
        return 0

    assert run(main) == 0
    assert signal.getsignal(signal.SIGTERM) is before
