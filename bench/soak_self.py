"""The router under 1,000 streams for ten minutes, with long prompts counted beside them: python bench/soak_self.py

Shows that no stream fails, that memory is flat, and that the event loop never stands still for 50 ms while prompts of
30,000 and 200,000 tokens are counted exactly by a real tokenizer. Stalls are read from the router's own
`router_loop_delay_seconds` and, independent of it, from a probe of /healthz every 20 ms by a process of its own, whose
longest wait is `loop_stall_max_s`. Where the router was ready to run and others had the processor, that is the
machine's doing and is told apart; better let nothing else run on it.

Memory is that of the router's process: its mean over the 15 s from minute 1 on (from a quarter of a shorter run)
against that over the last 15 s. `count_p50_s` is the whole time of a long request on an engine that answers at once:
reading its body, waiting in line, counting, sending.

Exit codes: 0 measured, 1 something could not be, 3 with --check where errors, growth or stalls are too many.
"""

import argparse
import asyncio
import contextlib
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx

from bench import clients, machine
from bench.children import running
from bench.proxies import Proxy, mocks, router, router_config, tokenizer_folder
from bench.scrape import Series, series
from bench.script import measured, show
from bench.yardstick.cost import cpu_time, pss_mib, rss_mib, waited_for_cpu_s
from bench.yardstick.load import Load, Outcome, send_beside

#: The router keeps at most 512 connections to one engine.
ENGINES = 4
STREAM_TOKENS = 240
INTERVAL_US = 250_000
SAMPLE_INTERVAL_S = 5.0
WINDOW_S = 15.0
LONG_PROMPTS = (30_000, 200_000)
#: Between two long prompts, each of the two sizes in turn.
LONG_PROMPT_INTERVAL_S = 2.0
LONG_PROMPT_MAX_S = 120.0
MAX_MODEL_LEN = 262_144
GROWTH_MAX_RATIO = 0.05
STALL_S = 0.05
_MARK = "@" * 8
_JSON = {"content-type": "application/json"}


@dataclass(slots=True)
class Notes:
    """What was seen on the way."""

    memory: list[tuple[float, float, float]] = field(default_factory=list)
    counted_s: dict[int, list[float]] = field(default_factory=lambda: {tokens: [] for tokens in LONG_PROMPTS})
    prompt_failures: list[str] = field(default_factory=list)


def soak_config(engines: list[Any], model: Path) -> dict[str, Any]:
    """Streams are chat; the long prompts are batch, and every prompt is counted exactly."""
    tokenizer = {"kind": "huggingface", "path": str(model), "exact": "always", "timeout_s": 60}
    config = router_config(engines, tokenizer=tokenizer)
    config["models"][0]["pools"]["batch"]["max_model_len"] = MAX_MODEL_LEN
    return config


def long_prompts(model: Path) -> dict[int, bytes]:
    """A request body for each size; `_MARK` in it is replaced, so that no two prompts are the same."""
    import tokenizers

    draw = random.Random(1)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(5000)]
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    sample = " ".join(draw.choices(words, k=5000))
    words_a_token = 5000 / len(tokenizer.encode(sample).ids)
    bodies = {}
    for tokens in LONG_PROMPTS:
        text = f"{_MARK} " + " ".join(draw.choices(words, k=int(tokens * words_a_token)))
        bodies[tokens] = json.dumps(clients.chat(text)).encode()
    return bodies


async def count_beside(url: str, bodies: dict[int, bytes], until_s: float, notes: Notes) -> None:
    """Post the long prompts in turn until the time is over."""
    number = 0
    async with clients.client(2) as http:
        while time.monotonic() < until_s:
            tokens = LONG_PROMPTS[number % len(LONG_PROMPTS)]
            number += 1
            body = bodies[tokens].replace(_MARK.encode(), b"%08d" % number)
            began_s = time.monotonic()
            try:
                answer = await http.post(
                    f"{url}/v1/chat/completions", content=body, headers=_JSON, timeout=LONG_PROMPT_MAX_S
                )
                if answer.status_code == 200:
                    notes.counted_s[tokens].append(time.monotonic() - began_s)
                else:
                    notes.prompt_failures.append(f"HTTP {answer.status_code}: {answer.text[:200]}")
            except httpx.HTTPError as error:
                notes.prompt_failures.append(type(error).__name__)
            await asyncio.sleep(max(0.0, LONG_PROMPT_INTERVAL_S - (time.monotonic() - began_s)))


async def sample_memory(pid: int, began_s: float, until_s: float, notes: Notes) -> None:
    while (now_s := time.monotonic()) < until_s:
        notes.memory.append((now_s - began_s, rss_mib(pid), await asyncio.to_thread(pss_mib, pid)))
        await asyncio.sleep(SAMPLE_INTERVAL_S)


async def soak(proxy: Proxy, load: Load, bodies: dict[int, bytes]) -> tuple[Outcome, Notes]:
    notes = Notes()
    began_s = time.monotonic()
    until_s = began_s + load.seconds
    async with asyncio.TaskGroup() as group:
        streams = group.create_task(send_beside(proxy.port, load))
        group.create_task(count_beside(proxy.url, bodies, until_s, notes))
        group.create_task(sample_memory(proxy.pid, began_s, until_s, notes))
        for minute in range(int(load.seconds // 60)):
            await asyncio.sleep(max(0.0, began_s + 60 * (minute + 1) - time.monotonic()))
            sys.stderr.write(f"minute {minute + 1}: RSS {notes.memory[-1][1]:.1f} MiB\n")
    return streams.result(), notes


def run(minutes: float, streams: int, folder: Path) -> dict[str, Any]:
    model = tokenizer_folder(folder / "model")
    bodies = long_prompts(model)
    lifetime_s = STREAM_TOKENS * INTERVAL_US / 1e6
    load = Load(
        connections=streams,
        seconds=minutes * 60,
        is_stream=True,
        tokens=STREAM_TOKENS,
        stagger_us=10_000,
        last_answers_s=lifetime_s + 30,
    )
    with mocks(folder, ENGINES, max_model_len=MAX_MODEL_LEN) as engines:
        for engine in engines:
            engine.set(ttft_us=20_000, interval_us=INTERVAL_US)
        with router(soak_config(engines, model), folder) as proxy:
            with probing(proxy, folder) as probed:
                # The start has stalls of its own, before anyone is served.
                stalls_before = stalls(series(proxy.url))
                before, waited_before_s = cpu_time(proxy.pid), waited_for_cpu_s(proxy.pid)
                began_s = time.monotonic()
                outcome, notes = asyncio.run(soak(proxy, load, bodies))
                cores = (cpu_time(proxy.pid) - before).total_s / (time.monotonic() - began_s)
                waited_s = waited_for_cpu_s(proxy.pid) - waited_before_s
            page = series(proxy.url)
    used = {
        "stalls_over_50ms": stalls(page) - stalls_before,
        "router_cores": round(cores, 3),
        "router_waited_for_cpu_s": round(waited_s, 3),
    }
    return report(minutes, streams, outcome, notes, page, probed) | used


@contextlib.contextmanager
def probing(proxy: Proxy, folder: Path) -> Iterator[dict[str, Any]]:
    """The probe runs while the block does; what it found is in the value afterwards."""
    out = folder / "probe.json"
    found: dict[str, Any] = {}
    script = str(Path(__file__).parent / "loop_probe.py")
    with running("probe", [sys.executable, script, str(proxy.port), str(proxy.pid), str(out)], folder):
        yield found
    found |= json.loads(out.read_text())


def report(
    minutes: float, streams: int, outcome: Outcome, notes: Notes, page: Series, probed: dict[str, Any]
) -> dict[str, Any]:
    first, last = _window(notes.memory, min(60.0, minutes * 15)), _window(notes.memory, minutes * 60 - WINDOW_S)
    counted = [took_s for values in notes.counted_s.values() for took_s in values]
    return {
        "minutes": minutes,
        "streams": streams,
        "errors": outcome.failures + len(notes.prompt_failures) + probed["failures"],
        "first_error": outcome.first_error or next(iter(notes.prompt_failures), None),
        "streams_done": outcome.ok,
        "events": outcome.events,
        "rss_first_mib": round(first, 1),
        "rss_last_mib": round(last, 1),
        "rss_max_mib": round(max(rss for _, rss, _ in notes.memory), 1),
        "rss_growth_ratio": round(last / first - 1, 4),
        "rss_slope_mib_per_minute": _slope(notes.memory, min(60.0, minutes * 15)),
        "pss_last_mib": round(notes.memory[-1][2], 1),
        "loop_stall_max_s": probed["max_s"],
        "probe": probed,
        "prompts_counted": len(counted),
        "prompts_counted_exactly_in_all": int(page.total("router_counted_total", method="exact")),
        "count_p50_s": {
            str(tokens): round(statistics.median(values), 3) if values else None
            for tokens, values in notes.counted_s.items()
        },
        "machine": machine.describe(),
    }


def stalls(page: Series) -> int:
    """How often the router's loop was late by more than `STALL_S`, by its own account since its start."""
    buckets = page.buckets("router_loop_delay_seconds")
    return int(max(buckets.values()) - buckets[STALL_S])


def _window(memory: list[tuple[float, float, float]], from_s: float) -> float:
    """The mean of RSS over `WINDOW_S` from then on, or the sample nearest to it."""
    inside = [rss for at_s, rss, _ in memory if from_s <= at_s <= from_s + WINDOW_S]
    return statistics.fmean(inside) if inside else min(memory, key=lambda one: abs(one[0] - from_s))[1]


def _slope(memory: list[tuple[float, float, float]], from_s: float) -> float | None:
    """The straight line through all samples from then on."""
    points = [(at_s / 60, rss) for at_s, rss, _ in memory if at_s >= from_s]
    if len(points) < 3:
        return None
    return round(statistics.linear_regression(*zip(*points, strict=True)).slope, 3)


def broken_promises(found: dict[str, Any]) -> list[str]:
    wrong = []
    if found["errors"]:
        wrong.append(f"{found['errors']} errors, the first: {found['first_error']}")
    if found["rss_growth_ratio"] > GROWTH_MAX_RATIO:
        wrong.append(f"memory grew by {found['rss_growth_ratio']:.1%}, at most {GROWTH_MAX_RATIO:.0%} is flat")
    unexplained = found["stalls_over_50ms"] - found["router_waited_for_cpu_s"] / STALL_S
    if unexplained > 0:
        wrong.append(f"the loop stood still over 50 ms {found['stalls_over_50ms']} times, not for want of a processor")
    probe = found["probe"]
    if probe["over_50ms_own"]:
        wrong.append(f"{probe['over_50ms_own']} answers of /healthz took over 50 ms, the longest {probe['max_s']} s")
    if not found["prompts_counted"] or not found["streams_done"]:
        wrong.append("no stream was finished, or no long prompt counted")
    return wrong


def allow_open_files(wanted: int) -> None:
    """For this process and its children. Raises: `OSError` where the system does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(hard, wanted)))
        except ValueError as error:
            raise OSError(f"{wanted} open files are needed, the hard limit is {hard} (ulimit -Hn)") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long streams are started (10)")
    parser.add_argument("--streams", type=int, default=1000, help="at one time, at most 2000 (1000)")
    parser.add_argument("--check", action="store_true", help="exit code 3 where a promise is not kept")
    parser.add_argument("--json", action="store_true", help="one line of JSON, for programs")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()
    if not 0 < arguments.minutes <= 120 or not 0 < arguments.streams <= 2000:
        parser.error("--minutes is up to 120, --streams up to 2000")

    def measure(folder: Path) -> dict[str, Any]:
        allow_open_files(4 * arguments.streams + 1024)
        return run(arguments.minutes, arguments.streams, folder)

    found = measured("soak", measure)
    found["broken_promises"] = broken_promises(found)
    show(found, arguments.out, json.dumps(found) if arguments.json else None)
    return 3 if arguments.check and found["broken_promises"] else 0


if __name__ == "__main__":
    sys.exit(main())
