"""Memory, files and threads over hours of everything at once: python bench/memory_growth.py [--scale 1]

50 requests a second, open loop, for two hours at --scale 1: no two prompts, ids or users alike; 30 in 100 clients hang
up at a random moment; about 5 in 100 engine answers are a 500; 1 in 100 bodies has 5 MB; /metrics, /healthz and
/v1/models are asked for every second. Prompts are counted with a real tokenizer. A sample every 10 s.

After the first sixth (20 minutes) memory grows by less than 1 MiB an hour, or at a smaller scale by less than 3 %, and
files and threads do not. At rest afterwards nothing is held and memory is within 10 % of what it was after that sixth.

Exit codes: 0 all as it should be, 1 something could not be measured, 3 something grew.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx

from bench import clients, machine
from bench.proxies import Proxy, mocks, router, router_config, tokenizer_folder
from bench.scrape import open_files, series
from bench.script import measured, show
from bench.yardstick.cost import rss_mib

FULL_S = 7200.0
REQUESTS_PER_S = 50.0
LEAVING_RATIO, LARGE_RATIO = 0.3, 0.01
LARGE_BYTES = 5_000_000
FAIL_EVERY = 20
WARM_RATIO = 1 / 6
SLOPE_MAX_MIB_PER_H = 1.0
SHORT_GROWTH_MAX_RATIO = 0.03
REST_MAX_RATIO = 0.1
#: A sender that is this far behind leaves requests out instead of piling them up.
IN_FLIGHT_MAX = 500
PATIENCE_S = 60.0
_WORDS = (
    *("lorem", "ipsum", "dolor", "sit", "amet", "consectetur", "adipiscing", "elit", "sed", "do", "eiusmod", "tempor"),
    *("incididunt", "ut", "labore"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    rss_mib: float
    files: int
    threads: int
    in_flight: int
    held_tokens: int


def take(proxy: Proxy, began_s: float) -> Sample:
    page = series(proxy.url)
    status = Path(f"/proc/{proxy.pid}/status").read_text()
    return Sample(
        round(time.monotonic() - began_s, 1),
        round(rss_mib(proxy.pid), 2),
        open_files(proxy.pid),
        int(status.partition("Threads:")[2].split()[0]),
        int(page.total("router_in_flight_requests")),
        int(page.total("router_ledger_committed_tokens")),
    )


class Crowd:
    """The clients. All draws are of one seed."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self.words: Counter[str] = Counter()
        self._http = http
        self._url = url
        self._draw = random.Random(7)
        self._number = 0

    async def arrive(self, for_s: float) -> None:
        """Requests at random times, as their senders please, until `for_s` are over; then wait for the last."""
        until_s = time.monotonic() + for_s
        next_s = time.monotonic()
        running: set[asyncio.Task[None]] = set()
        try:
            while next_s < until_s:
                next_s += self._draw.expovariate(REQUESTS_PER_S)
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                if len(running) >= IN_FLIGHT_MAX:
                    self.words["not_sent"] += 1
                    continue
                task = asyncio.create_task(self._one())
                running.add(task)
                task.add_done_callback(running.discard)
        finally:
            if running:
                await asyncio.wait(running, timeout=PATIENCE_S)
            for task in running:
                task.cancel()

    async def _one(self) -> None:
        self._number += 1
        draw = self._draw.random()
        is_stream = self._draw.random() < 0.7
        count = self._draw.randint(5, 400)
        text = f"{self._number} " + " ".join(self._draw.choices(_WORDS, k=count))
        if draw < LARGE_RATIO:
            text = f"{self._number} " + "x" * LARGE_BYTES
        body = clients.chat(text, is_stream=is_stream, max_tokens=20) | {"user": f"user-{self._number}"}
        leaving_s = self._draw.uniform(0.0, 0.4) if draw > 1 - LEAVING_RATIO else None
        answer = await clients.ask(self._http, self._url, body, patience_s=leaving_s or PATIENCE_S)
        is_left = leaving_s is not None and answer.word == clients.GAVE_UP
        large = "large_" if draw < LARGE_RATIO else ""
        self.words["left" if is_left else f"{large}{answer.word}_{answer.status}"] += 1

    async def poll(self) -> None:
        """What monitoring asks for, until cancelled."""
        while True:
            for path in ("/metrics", "/healthz", "/v1/models"):
                answer = await self._http.get(f"{self._url}{path}", timeout=30)
                self.words["polled" if answer.status_code == 200 else "poll_failed"] += 1
            await asyncio.sleep(1.0)


async def watch(proxy: Proxy, began_s: float, interval_s: float, samples: list[Sample]) -> None:
    while True:
        samples.append(await asyncio.to_thread(take, proxy, began_s))
        await asyncio.sleep(interval_s)


async def run(scale: float, folder: Path) -> dict[str, Any]:
    model = tokenizer_folder(folder / "model")
    with mocks(folder) as engines:
        config = router_config(engines, tokenizer={"kind": "huggingface", "path": str(model)})
        for engine in engines:
            engine.set(ttft_us=50_000, interval_us=15_000, latency_us=100_000, fail_every=FAIL_EVERY)
        with router(config, folder) as proxy:
            began_s = time.monotonic()
            start = take(proxy, began_s)
            samples: list[Sample] = []
            async with clients.client(IN_FLIGHT_MAX + 10) as http:
                crowd = Crowd(http, proxy.url)
                beside = [
                    asyncio.create_task(watch(proxy, began_s, max(0.5, 10 * scale), samples)),
                    asyncio.create_task(crowd.poll()),
                ]
                try:
                    await crowd.arrive(FULL_S * scale)
                finally:
                    for task in beside:
                        task.cancel()
                    await asyncio.wait(beside)
            # Idle engine connections close after 4 s.
            await asyncio.sleep(max(6.0, 60 * scale))
            rest = take(proxy, began_s)
            for task in beside:
                if not task.cancelled() and (error := task.exception()):
                    raise RuntimeError(f"a watcher failed: {error!r}") from error
    return summary(scale, start, samples, rest) | {"answers": dict(crowd.words), "machine": machine.describe()}


def summary(scale: float, start: Sample, samples: list[Sample], rest: Sample) -> dict[str, Any]:
    warm = [one for one in samples if one.at_s >= FULL_S * scale * WARM_RATIO]
    tenth = max(1, len(warm) // 10)
    first, last = warm[:tenth], warm[-tenth:]
    slope = statistics.linear_regression([one.at_s / 3600 for one in warm], [one.rss_mib for one in warm]).slope
    return {
        "scale": scale,
        "start": asdict(start),
        "rest": asdict(rest),
        "rss_warm_mib": round(statistics.fmean(one.rss_mib for one in first), 1),
        "rss_last_mib": round(statistics.fmean(one.rss_mib for one in last), 1),
        "rss_max_mib": max(one.rss_mib for one in samples),
        "rss_slope_mib_per_h": round(slope, 2),
        "files_warm": statistics.fmean(one.files for one in first),
        "files_last": statistics.fmean(one.files for one in last),
        "threads_warm": max(one.threads for one in first),
        "threads_last": max(one.threads for one in last),
        "samples": len(samples),
    }


def faults(found: dict[str, Any]) -> list[str]:
    wrong = []
    warm, last, rest = found["rss_warm_mib"], found["rss_last_mib"], found["rest"]
    if found["scale"] >= 0.5:
        if found["rss_slope_mib_per_h"] > SLOPE_MAX_MIB_PER_H:
            wrong.append(f"memory grows by {found['rss_slope_mib_per_h']} MiB an hour")
    elif last > warm * (1 + SHORT_GROWTH_MAX_RATIO):
        wrong.append(f"memory grew from {warm} to {last} MiB")
    if rest["rss_mib"] > warm * (1 + REST_MAX_RATIO):
        wrong.append(f"memory at rest is {rest['rss_mib']} MiB, it was {warm} MiB under load")
    if found["files_last"] > found["files_warm"] * 1.2 + 5:
        wrong.append(f"open files grew from {found['files_warm']:.0f} to {found['files_last']:.0f}")
    if rest["files"] > found["start"]["files"] + 2:
        wrong.append(f"{rest['files']} files are open at rest, {found['start']['files']} were at the start")
    if found["threads_last"] > found["threads_warm"]:
        wrong.append(f"threads grew from {found['threads_warm']} to {found['threads_last']}")
    if rest["in_flight"] or rest["held_tokens"]:
        wrong.append(f"at rest {rest['in_flight']} requests are in flight and {rest['held_tokens']} tokens held")
    wrong += [f"{word}: {count}" for word, count in found["answers"].items() if not _is_expected(word)]
    return wrong


def _is_expected(word: str) -> bool:
    """A 500 of the engine is passed on as 502; a body of 5 MB is over the context; the rest is well or left."""
    return word in ("left", "polled", "ok_200", "engine_failed_502", "large_engine_failed_400", "not_sent")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.01, help="1 is full length, two hours (0.01)")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()
    if not 0.002 <= arguments.scale <= 10:
        parser.error("--scale lies between 0.002 and 10")
    found = measured("memory_growth", lambda folder: asyncio.run(run(arguments.scale, folder)))
    found["faults"] = faults(found)
    show(found, arguments.out)
    return 3 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
