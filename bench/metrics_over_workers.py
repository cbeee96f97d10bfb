"""What /metrics says while workers come and go: python bench/metrics_over_workers.py [--scale 1]

Four workers serve under load while one after the other is ended, by turns with SIGTERM and with `kill -9` (50 times at
--scale 1, which takes about half an hour, since a worker that keeps dying is started ever later). /metrics is read four
times a second. Before that, requests of 5 ms, 70 s and 700 s (shortened alike) are looked up in the buckets.

    counters never fall, no gauge of a dead worker stays, a page comes within 200 ms, shared files do not grow
    finite buckets reach the longest request that the limits allow; overhead is told apart between 1 and 100 ms
    arrivals less outcomes are at most what ran in workers at the moment of their `kill -9`

Exit codes: 0 all as it should be, 1 something could not be measured, 3 something was wrong.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from bench import clients, machine
from bench.children import ChildFailed
from bench.proxies import Mock, Proxy, mocks, router, router_config
from bench.scrape import Series, engine_states, series
from bench.script import measured, show
from bench.yardstick.cost import family
from bench.yardstick.load import Load, send_beside

WORKERS = 4
CONNECTIONS = 32
RECYCLED = 50
REQUEST_S = (0.005, 70.0, 700.0)
SCRAPE_INTERVAL_S = 0.25
SCRAPE_MAX_S = 0.2
#: Batch may wait an hour in the queue and an hour for its first byte, by default.
LONGEST_S = 7200.0
#: A worker that keeps dying is started again after up to 30 s, and needs some for itself.
BACK_MAX_S = 60.0
AT_REST_MAX_S = 15.0
#: The machine is shared with the load: single pages may be late.
SCRAPES_LATE_MAX_RATIO = 0.02
_COUNTERS = ("_total", "_count", "_sum", "_bucket")


@dataclass(slots=True)
class Seen:
    """What the pages said over time."""

    pages: int = 0
    late: int = 0
    longest_s: float = 0.0
    unanswered: int = 0
    fell: dict[str, str] = field(default_factory=dict)
    last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)
    files_max: int = 0
    bytes_max: int = 0

    def note(self, page: Series, took_s: float) -> None:
        self.pages += 1
        self.late += took_s > SCRAPE_MAX_S
        self.longest_s = max(self.longest_s, took_s)
        for sample in page.samples:
            if not sample.name.endswith(_COUNTERS):
                continue
            key = (sample.name, tuple(sorted(sample.labels.items())))
            before = self.last.get(key, 0.0)
            # Sums of floats over workers may differ in the last bits by the order of adding.
            if sample.value < before * (1 - 1e-9) and len(self.fell) < 20:
                self.fell[f"{sample.name}{sample.labels}"] = f"{before} to {sample.value}"
            self.last[key] = sample.value
        for name, labels in self.last.keys() - {(one.name, tuple(sorted(one.labels.items()))) for one in page.samples}:
            self.fell[f"{name}{dict(labels)}"] = "vanished"


def workers_config(engines: list[Mock]) -> dict[str, Any]:
    config = router_config(engines)
    config["server"]["workers"] = WORKERS
    return config


def worker_pids(proxy: Proxy) -> list[int]:
    """The worker processes; the embedded store and Python's own helper are none."""
    found = []
    for pid in family(proxy.pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"spawn_main" in words:
                found.append(pid)
    return sorted(found)


async def read_pages(url: str, folder: Path, is_over: asyncio.Event, seen: Seen) -> None:
    while not is_over.is_set():
        began_s = time.monotonic()
        try:
            page = await asyncio.to_thread(series, url)
            seen.note(page, time.monotonic() - began_s)
        except OSError:
            seen.unanswered += 1  # the worker that had the connection was killed
        sizes = [file.stat().st_size for file in folder.glob("**/*") if file.is_file()]
        seen.files_max, seen.bytes_max = max(seen.files_max, len(sizes)), max(seen.bytes_max, sum(sizes))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SCRAPE_INTERVAL_S):
                await is_over.wait()


async def recycle(proxy: Proxy, times: int) -> dict[str, int]:
    """End one worker after the other. Returns how often with which signal."""
    done = {"SIGTERM": 0, "SIGKILL": 0}
    for number in range(times):
        await until(lambda: len(worker_pids(proxy)) == WORKERS, "back with all workers")
        pids = worker_pids(proxy)
        asked = signal.SIGTERM if number % 2 else signal.SIGKILL
        os.kill(pids[0], asked)
        done[asked.name] += 1
        await until(partial(_is_gone, proxy, pids[0]), "rid of the worker")
        sys.stderr.write(f"ended worker {number + 1} of {times} with {asked.name}\n")
        await asyncio.sleep(1.0)
    await until(lambda: len(worker_pids(proxy)) == WORKERS, "back with all workers")
    return done


def _is_gone(proxy: Proxy, pid: int) -> bool:
    return pid not in worker_pids(proxy)


async def until(is_so: Callable[[], bool], what: str) -> None:
    """Raises: `ChildFailed` where it does not come about."""
    until_s = time.monotonic() + BACK_MAX_S
    while not is_so():
        if time.monotonic() > until_s:
            raise ChildFailed(f"the router was not {what} within {BACK_MAX_S:g} s")
        await asyncio.sleep(0.05)


async def place_in_buckets(proxy: Proxy, engines: list[Mock], scale: float) -> list[dict[str, Any]]:
    """Requests of given times, and the bounds between which the histogram has put them."""
    found = []
    async with clients.client(1) as http:
        for full_s in REQUEST_S:
            wanted_s = max(0.005, full_s * scale)
            for engine in engines:
                engine.set(latency_us=int(wanted_s * 1e6))
            before = series(proxy.url).buckets("router_request_duration_seconds")
            answer = await clients.ask(http, proxy.url, clients.chat(), patience_s=wanted_s + 60)
            await asyncio.sleep(0.1)
            after = series(proxy.url).buckets("router_request_duration_seconds")
            added = [bound for bound in after if after[bound] > before.get(bound, 0.0)]
            below = [bound for bound in after if added and bound < added[0]]
            found.append(
                {
                    "engine_took_s": wanted_s,
                    "took_s": round(answer.waited_s, 3),
                    "above_s": below[-1] if below else 0.0,
                    "at_most_s": added[0] if added else None,
                }
            )
    for engine in engines:
        engine.set(latency_us=2000)
    return found


def shared_folders() -> set[Path]:
    places = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    return {folder for place in places if place.is_dir() for folder in place.glob("router-metrics-*")}


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[tuple[Proxy, list[Mock], Path]]:
    before = shared_folders()
    with mocks(folder) as engines, router(workers_config(engines), folder) as proxy:
        (shared,) = shared_folders() - before
        yield proxy, engines, shared


async def run(scale: float, folder: Path) -> dict[str, Any]:
    times = max(2, round(RECYCLED * scale))
    with staged(folder) as (proxy, engines, shared):
        await until(lambda: len(worker_pids(proxy)) == WORKERS, "there with all workers")
        await until(lambda: set(engine_states(proxy.url).values()) == {"serving"}, "serving")
        placed = await place_in_buckets(proxy, engines, scale)
        seen, is_over = Seen(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read_pages(proxy.url, shared, is_over, seen))
            load = group.create_task(send_beside(proxy.port, Load(CONNECTIONS, 7000.0)))
            done = await recycle(proxy, times)
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load
            is_over.set()
            await reading
        page = await at_rest(proxy)
        names = {sample.name for sample in page.samples if sample.name.endswith("_bucket")}
        tops = {name: _finite_bounds(page, name) for name in sorted(names)}
    return {
        "scale": scale,
        "workers_ended": done,
        "placed": placed,
        "pages": seen.pages,
        "pages_late": seen.late,
        "page_longest_s": round(seen.longest_s, 3),
        "pages_unanswered": seen.unanswered,
        "series_fell": seen.fell,
        "shared_files_max": seen.files_max,
        "shared_bytes_max": seen.bytes_max,
        "in_flight_at_rest": page.total("router_in_flight_requests"),
        "tokens_held_at_rest": page.total("router_ledger_committed_tokens"),
        "arrivals": int(page.total("router_arrivals_total")),
        "without_outcome": int(page.total("router_arrivals_total") - page.total("router_requests_total")),
        "top_bucket_s": {name: bounds[-1] for name, bounds in tops.items() if name.endswith("seconds_bucket")},
        "overhead_bounds_1_to_100_ms": [b for b in tops["router_overhead_seconds_bucket"] if 0.001 <= b <= 0.1],
        "machine": machine.describe(),
    }


def _finite_bounds(page: Series, name: str) -> list[float]:
    bounds = {float(sample.labels["le"]) for sample in page.samples if sample.name == name}
    return sorted(bound for bound in bounds if bound != float("inf"))


async def at_rest(proxy: Proxy) -> Series:
    """The page once nothing runs, or what it says after `AT_REST_MAX_S`."""
    until_s = time.monotonic() + AT_REST_MAX_S
    while True:
        await asyncio.sleep(1.2)
        page = series(proxy.url)
        if not page.total("router_in_flight_requests") or time.monotonic() > until_s:
            return page


def faults(found: dict[str, Any]) -> list[str]:
    wrong = []
    if found["series_fell"]:
        wrong.append(f"{len(found['series_fell'])} counters fell")
    if found["pages_late"] > max(1, found["pages"] * SCRAPES_LATE_MAX_RATIO):
        wrong.append(f"{found['pages_late']} of {found['pages']} pages took over {SCRAPE_MAX_S} s")
    if found["in_flight_at_rest"] or found["tokens_held_at_rest"]:
        wrong.append("something is still in flight or held at rest")
    killed = found["workers_ended"]["SIGKILL"]
    if not 0 <= found["without_outcome"] <= killed * CONNECTIONS:
        wrong.append(f"{found['without_outcome']} arrivals without an outcome after {killed} kills")
    durations = ("router_request_duration_seconds_bucket", "router_time_to_first_token_seconds_bucket")
    if any(found["top_bucket_s"][name] < LONGEST_S for name in durations):
        wrong.append(f"the top bucket does not reach {LONGEST_S:g} s: {found['top_bucket_s']}")
    if len(found["overhead_bounds_1_to_100_ms"]) < 4:
        wrong.append(f"overhead is not told apart: {found['overhead_bounds_1_to_100_ms']}")
    wrong += [f"a request was put into the wrong bucket: {one}" for one in found["placed"] if not _is_placed(one)]
    return wrong


def _is_placed(one: dict[str, Any]) -> bool:
    """The router's time lies between the engine's and the client's, and in the bucket."""
    return one["at_most_s"] is not None and one["above_s"] < one["took_s"] and one["engine_took_s"] <= one["at_most_s"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.08, help="1 is full length (0.08)")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()
    if not 0 < arguments.scale <= 1:
        parser.error("--scale lies between 0 and 1")
    found = measured("metrics_over_workers", lambda folder: asyncio.run(run(arguments.scale, folder)))
    found["faults"] = faults(found)
    show(found, arguments.out)
    return 3 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
