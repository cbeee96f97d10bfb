"""The watch on the event loop, and what a process takes of the machine."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from router.observe import process, stalls
from router.observe.metrics import Metrics
from router.observe.stalls import LoopWatch
from tests.flow.jumping import JumpingLoop, run_on
from tests.http.scrape import Metrics as Page


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> JumpingLoop:
    """One whose time is the clock's too."""
    jumping = JumpingLoop()
    monkeypatch.setattr(stalls, "time", SimpleNamespace(monotonic=jumping.time))
    return jumping


def test_a_loop_that_was_kept_shows_how_long(loop: JumpingLoop) -> None:
    delays: list[float] = []

    async def main() -> None:
        with LoopWatch(delays.append):
            loop.time_s += 3.0
            await asyncio.sleep(2.5 * stalls.BEAT_S)

    run_on(loop, main())

    assert delays == pytest.approx([3.0 - stalls.BEAT_S, 0.0, 0.0])


def test_the_watch_ends_with_its_block(loop: JumpingLoop) -> None:
    delays: list[float] = []

    async def main() -> None:
        with LoopWatch(delays.append):
            await asyncio.sleep(3.5 * stalls.BEAT_S)
        await asyncio.sleep(100 * stalls.BEAT_S)

    run_on(loop, main())

    assert delays == pytest.approx([0.0, 0.0, 0.0])


def test_delays_are_a_histogram_without_labels() -> None:
    metrics = Metrics()

    metrics.loop_was_late(0.0)
    metrics.loop_was_late(0.07)

    page = Page(metrics.page().decode())
    assert page.by("router_loop_delay_seconds_bucket", "le")["0.05"] == 1
    assert page.by("router_loop_delay_seconds_bucket", "le")["0.1"] == 2
    assert page.value("router_loop_delay_seconds_sum") == 0.07


def test_memory_and_cpu_time_are_those_of_this_process() -> None:
    assert 10 * 2**20 < process.resident_bytes() < 2**40
    assert 0 < process.cpu_s() <= sum(os.times()[:2]) + 1


@pytest.mark.parametrize("kernel_counts", [True, False])
def test_open_files_are_all_that_are_open(kernel_counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel_counts:
        files = Path("/proc/self/fd")
        monkeypatch.setattr(
            process, "_FILES", SimpleNamespace(stat=lambda: SimpleNamespace(st_size=0), iterdir=files.iterdir)
        )
    before = process.open_files()

    with (tmp_path / "one").open("w"), (tmp_path / "other").open("w"):
        during = process.open_files()

    assert during == before + 2
