"""The watch on the event loop, and what a process takes of the machine."""

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from router.observe import process, stalls
from router.observe.metrics import Metrics
from router.observe.stalls import LoopWatch
from tests.http.scrape import Metrics as Page

BLOCKED_S = 0.03


def test_a_loop_that_was_kept_shows_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "BEAT_S", 0.001)
    delays: list[float] = []

    async def main() -> None:
        with LoopWatch(delays.append):
            time.sleep(BLOCKED_S)
            while not delays:
                await asyncio.sleep(0)

    asyncio.run(main())

    assert delays[0] >= BLOCKED_S - 0.001
    assert min(delays) >= 0


def test_the_watch_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "BEAT_S", 0.001)
    delays: list[float] = []

    async def main() -> int:
        with LoopWatch(delays.append):
            while len(delays) < 3:
                await asyncio.sleep(0)
        told = len(delays)
        await asyncio.sleep(0.01)
        return told

    told = asyncio.run(main())

    assert len(delays) == told


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
