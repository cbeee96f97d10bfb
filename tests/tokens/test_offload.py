"""Blocking work beside the event loop."""

import asyncio
import threading

import pytest

from router.tokens.offload import Missed, Offload


class PanicLike(BaseException):
    """As pyo3's PanicException: no subclass of Exception."""


def _raise(error: BaseException) -> int:
    raise error


def test_a_job_runs_in_another_thread_and_gives_its_result() -> None:
    async def scenario() -> int | None:
        offload = Offload(timeout_s=30)
        try:
            return await offload.run(threading.get_ident)
        finally:
            offload.close()

    assert asyncio.run(scenario()) not in (None, threading.get_ident())


@pytest.mark.parametrize("error", [ValueError("x"), RecursionError(), PanicLike()])
def test_whatever_a_job_raises_is_a_miss_and_the_next_job_runs(error: BaseException) -> None:
    async def scenario() -> tuple[int | None, int | None, int]:
        offload = Offload(timeout_s=30)
        try:
            return await offload.run(lambda: _raise(error)), await offload.run(lambda: 7), offload.missed[Missed.FAILED]
        finally:
            offload.close()

    assert asyncio.run(scenario()) == (None, 7, 1)


def test_past_the_places_there_are_jobs_are_refused_at_once() -> None:
    async def scenario() -> tuple[list[int | None], int | None, int | None]:
        gate = threading.Event()
        offload = Offload(timeout_s=30, threads=1, waiting_max=2)
        try:
            running = [asyncio.create_task(offload.run(lambda: int(gate.wait()))) for _ in range(3)]
            await asyncio.sleep(0)
            refused = await offload.run(lambda: 1)
            gate.set()
            done = await asyncio.gather(*running)
            return done, refused, await offload.run(lambda: 2)
        finally:
            gate.set()
            offload.close()

    assert asyncio.run(scenario()) == ([1, 1, 1], None, 2)


def test_a_job_that_takes_too_long_keeps_its_place_until_it_ends() -> None:
    async def scenario() -> tuple[int | None, int | None, int | None]:
        gate = threading.Event()
        offload = Offload(timeout_s=0, threads=1, waiting_max=0)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stuck() -> int:
            gate.wait()
            return 1

        try:
            late = await offload.run(stuck)
            busy = offload.missed.get(Missed.TIMEOUT)
            refused = await offload.run(lambda: 2)
            gate.set()
            # The one thread is free again once a job handed to it directly has run.
            offload._executor.submit(loop.call_soon_threadsafe, ended.set)
            await ended.wait()
            return late, busy, refused
        finally:
            gate.set()
            offload.close()

    assert asyncio.run(scenario()) == (None, 1, None)


def test_a_caller_that_is_cancelled_gives_its_place_back() -> None:
    async def scenario() -> int | None:
        gate = threading.Event()
        offload = Offload(timeout_s=30, threads=1, waiting_max=1)
        try:
            running = asyncio.create_task(offload.run(lambda: int(gate.wait())))
            waiting = asyncio.create_task(offload.run(lambda: 1))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            next_one = asyncio.create_task(offload.run(lambda: 2))
            await asyncio.sleep(0)
            gate.set()
            await running
            return await next_one
        finally:
            gate.set()
            offload.close()

    assert asyncio.run(scenario()) == 2


def test_closing_drops_what_waits_without_cancelling_the_callers() -> None:
    async def scenario() -> tuple[int | None, int | None, int | None]:
        gate = threading.Event()
        offload = Offload(timeout_s=30, threads=1)
        running = asyncio.create_task(offload.run(lambda: int(gate.wait())))
        waiting = asyncio.create_task(offload.run(lambda: 1))
        await asyncio.sleep(0)
        offload.close()
        offload.close()
        gate.set()
        return await running, await waiting, await offload.run(lambda: 3)

    assert asyncio.run(scenario()) == (1, None, None)
