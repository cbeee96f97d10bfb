"""What clients see of an engine that fails, and what engines see of clients that leave: python bench/failover.py

One of two engines (a) answers 500 with a green /health, (b) accepts requests and says nothing, with a green /health,
(c) is gone; 400 requests each, half of them streams, eight at a time. Then (d) 50 streams and 50 plain requests whose
clients hang up. Each case has its own router and engines, and the first-byte limit is set to 2 s, so that (b) can be
waited for; all else is the default. --peers asks vllm-router the same.

Exit codes: 0 measured, 1 something could not be, 3 with --check where the router did not keep its word.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import clients, machine
from bench.clients import Answer
from bench.proxies import Mock, Proxy, mocks, router, router_config, vllm_router
from bench.scrape import engine_states, open_sockets, series
from bench.script import measured, show

REQUESTS = 400
AT_ONCE = 8
HANG_UPS = 50
FIRST_BYTE_S = 2.0
#: A plain answer has its first byte only with its last token, so the router allows 0.25 s a token more.
MAX_TOKENS = 4
PLAIN_FIRST_BYTE_S = FIRST_BYTE_S + 0.25 * MAX_TOKENS
#: What this client's own clock may be late by on a busy machine.
SLACK_S = 1.0
#: Losses in a row that take an engine out (docs/engines.md); what is under way on it by then is lost as well.
LOSSES_TO_DOWN = 3
LOST_MAX = LOSSES_TO_DOWN + AT_ONCE - 1
CANCELLED_MAX_S = 2.0
PATIENCE_S = 15.0
#: A proxy that leaves its clients waiting is not watched for longer than this.
CASE_MAX_S = 40.0
FOREVER_US = 3_600_000_000
_AT_REST_MAX_S = 10.0

Start = Callable[[list[Mock], Path], AbstractContextManager[Proxy]]


@dataclass(frozen=True, slots=True)
class Subject:
    """A kind of proxy. `tells`: whether it says what it holds, as ours does."""

    name: str
    start: Start
    tells: bool


def our_router(engines: list[Mock], folder: Path) -> AbstractContextManager[Proxy]:
    config = router_config(engines)
    for pool in config["models"][0]["pools"].values():
        pool["timeouts"] = {"first_byte_s": FIRST_BYTE_S}
    return router(config, folder)


OURS = Subject("router", our_router, tells=True)
PEER = Subject("vllm_router", vllm_router, tells=False)


@contextlib.contextmanager
def stage(subject: Subject, folder: Path, case: str) -> Iterator[tuple[Proxy, list[Mock]]]:
    """The proxy in front of two engines that are well, and known to be."""
    inside = folder / f"{subject.name}-{case}"
    inside.mkdir()
    with mocks(inside) as engines, subject.start(engines, inside) as proxy:
        if subject.tells:
            proxy.child.wait_for(
                lambda: set(engine_states(proxy.url).values()) == {"serving"}, "serving on both engines", 20.0
            )
        yield proxy, engines


def break_engine(case: str, bad: Mock) -> None:
    """From here on one engine fails in the way of `case`."""
    if case == "answers_500":
        bad.set(status=500, reset=1)
    elif case == "stalled":
        bad.set(ttft_us=FOREVER_US, latency_us=FOREVER_US, reset=1)
    else:
        bad.child.kill()


async def send_all(url: str) -> tuple[list[Answer], int]:
    """The answers to the case's requests, and how many were not sent because the case took too long."""
    answers: list[Answer] = []
    until_s = time.monotonic() + CASE_MAX_S
    left = iter(range(REQUESTS))

    async def one_client(http: Any) -> None:
        for number in left:
            if time.monotonic() > until_s:
                return
            body = clients.chat(f"Hello {number}.", is_stream=number % 2 == 0, max_tokens=MAX_TOKENS)
            answers.append(await clients.ask(http, url, body, patience_s=PATIENCE_S))

    async with clients.client(AT_ONCE) as http, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one_client(http))
    return answers, REQUESTS - len(answers)


def watch_leaving(proxy: Proxy, bad: Mock, is_over: threading.Event) -> int | None:
    """How many requests the bad engine had seen when the router first said that it does not serve; None where it never
    said so before `is_over`. Runs in a thread of its own."""
    while engine_states(proxy.url).get(bad.name) == "serving":
        if is_over.wait(0.02):
            return None
    return bad.stats()["chat_requests"]


async def run_case(subject: Subject, folder: Path, case: str) -> dict[str, Any]:
    with stage(subject, folder, case) as (proxy, (_, bad)):
        sockets_before = open_sockets(proxy.pid)
        break_engine(case, bad)
        is_over = threading.Event()
        watching = None
        if subject.tells and case != "gone":
            watching = asyncio.create_task(asyncio.to_thread(watch_leaving, proxy, bad, is_over))
        try:
            answers, not_sent = await send_all(proxy.url)
        finally:
            is_over.set()
            left_after = await watching if watching is not None else None
        words = Counter(answer.word for answer in answers)
        longest = max(answers, key=lambda answer: answer.waited_s)
        failed = next((answer for answer in answers if answer.word not in (clients.OK, clients.REFUSED)), None)
        result: dict[str, Any] = {
            "sent": len(answers),
            "ok": words[clients.OK],
            "passed_on_500": words[clients.FAILED],
            "refused": words[clients.REFUSED],
            "broken": words[clients.BROKEN],
            "gave_up": words[clients.GAVE_UP],
            "not_sent": not_sent,
            "longest_wait_s": round(longest.waited_s, 3),
            "first_failure": f"{failed.status} {failed.detail}" if failed else None,
            "requests_to_bad_engine": None if case == "gone" else bad.stats()["chat_requests"],
            "left_after": left_after,
        }
        if subject.tells:
            if case == "gone":
                tried = series(proxy.url).total("router_attempts_total", target=bad.name)
                result["requests_to_bad_engine"] = result["left_after"] = int(tried)
            result |= at_rest(proxy, sockets_before)
        return result


def at_rest(proxy: Proxy, sockets_before: int) -> dict[str, Any]:
    """What the router still holds once its idle connections have had time to close."""
    until_s = time.monotonic() + _AT_REST_MAX_S
    while True:
        now = series(proxy.url)
        held = {
            "tokens_held_after": int(now.total("router_ledger_committed_tokens")),
            "in_flight_after": int(now.total("router_in_flight_requests")),
            "sockets_before": sockets_before,
            "sockets_after": open_sockets(proxy.pid),
        }
        is_clean = not held["tokens_held_after"] and not held["in_flight_after"]
        if (is_clean and held["sockets_after"] <= sockets_before) or time.monotonic() > until_s:
            break
        time.sleep(0.1)
    return held | {"arrivals_equal_outcomes": now.total("router_arrivals_total") == now.total("router_requests_total")}


async def run_hang_ups(subject: Subject, folder: Path, *, is_stream: bool) -> dict[str, Any]:
    with stage(subject, folder, f"hang-up-{'stream' if is_stream else 'plain'}") as (proxy, engines):
        sockets_before = open_sockets(proxy.pid)
        for engine in engines:
            engine.set(interval_us=20_000, latency_us=FOREVER_US, reset=1)
        reading = [await hold(proxy.port, is_stream=is_stream) for _ in range(HANG_UPS)]
        await until_running(engines, HANG_UPS)
        left_at_s = time.monotonic()
        for writer in reading:
            writer.transport.abort()
        cancelled_s: list[float] = []
        while (gone := HANG_UPS - running(engines)) < HANG_UPS and time.monotonic() - left_at_s < PATIENCE_S:
            cancelled_s += [time.monotonic() - left_at_s] * (gone - len(cancelled_s))
            await asyncio.sleep(0.002)
        cancelled_s += [time.monotonic() - left_at_s] * (gone - len(cancelled_s))
        result: dict[str, Any] = {
            "clients": HANG_UPS,
            "cancelled": len(cancelled_s),
            "cancelled_within_s": {
                "p50": round(cancelled_s[len(cancelled_s) // 2], 3) if len(cancelled_s) > HANG_UPS // 2 else None,
                "max": round(max(cancelled_s), 3) if len(cancelled_s) == HANG_UPS else None,
            },
            "engine_running_after": running(engines),
        }
        return result | (at_rest(proxy, sockets_before) if subject.tells else {})


async def hold(port: int, *, is_stream: bool) -> asyncio.StreamWriter:
    """A client that has sent its request and, of a stream, has read the first bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(clients.chat(is_stream=is_stream, max_tokens=2000)).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
    if is_stream:
        async with asyncio.timeout(PATIENCE_S):
            await reader.readuntil(b"data:")
    return writer


def running(engines: list[Mock]) -> int:
    return sum(engine.stats()["inflight"] for engine in engines)


async def until_running(engines: list[Mock], count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while running(engines) < count:
            await asyncio.sleep(0.005)


async def run(subject: Subject, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in ("answers_500", "stalled", "gone"):
        sys.stderr.write(f"{subject.name}: one engine of two {case.replace('_', ' ')}\n")
        found[case] = await run_case(subject, folder, case)
    sys.stderr.write(f"{subject.name}: clients that hang up\n")
    found["hang_up_streams"] = await run_hang_ups(subject, folder, is_stream=True)
    found["hang_up_plain"] = await run_hang_ups(subject, folder, is_stream=False)
    return found


def broken_promises(found: dict[str, Any]) -> list[str]:
    """What the router did not do of what it says, in words."""
    wrong: list[str] = []

    def expect(is_so: bool, what: str) -> None:
        if not is_so:
            wrong.append(what)

    for case in ("answers_500", "stalled", "gone"):
        one = found[case]
        lost_max = 0 if case == "gone" else LOST_MAX
        lost = one["passed_on_500"] + one["broken"]
        expect(lost <= lost_max, f"{case}: {lost} failures reached clients, at most {lost_max} may")
        expect(one["ok"] + lost == REQUESTS, f"{case}: {one['ok']} of {REQUESTS} answered well, {lost} failed")
        # A refused connection costs nobody anything: how often one is tried is not bounded by a count.
        seen = 0 if case == "gone" else one["requests_to_bad_engine"]
        expect(seen <= LOST_MAX, f"{case}: the engine was left after {seen} requests, at most {LOST_MAX} are right")
        limit_s = PLAIN_FIRST_BYTE_S + SLACK_S
        expect(one["longest_wait_s"] <= limit_s, f"{case}: a client waited {one['longest_wait_s']} s")
    for case in ("hang_up_streams", "hang_up_plain"):
        one = found[case]
        longest_s = one["cancelled_within_s"]["max"]
        expect(longest_s is not None and longest_s <= CANCELLED_MAX_S, f"{case}: cancelled within {longest_s} s")
        expect(one["engine_running_after"] == 0, f"{case}: {one['engine_running_after']} requests still run")
    for case, one in found.items():
        expect(one["tokens_held_after"] == 0, f"{case}: {one['tokens_held_after']} tokens still held")
        expect(one["in_flight_after"] == 0, f"{case}: {one['in_flight_after']} requests still in flight")
        expect(one["arrivals_equal_outcomes"], f"{case}: arrivals are not the sum of outcomes")
        more = one["sockets_after"] - one["sockets_before"]
        expect(more <= 0, f"{case}: {more} sockets more than before")
    return wrong


def table(report: dict[str, Any]) -> str:
    lines = []
    for name in ("router", "vllm_router"):
        for case, one in (report.get(name) or {}).items():
            shown = ", ".join(f"{key} {value}" for key, value in one.items() if value is not None)
            lines.append(f"{name}, {case}: {shown}")
    return "\n".join([*lines, *(f"NOT KEPT: {line}" for line in report["broken_promises"])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="ask vllm-router the same")
    parser.add_argument("--check", action="store_true", help="exit code 3 where a promise is not kept")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()

    def measure(folder: Path) -> dict[str, Any]:
        ours = asyncio.run(run(OURS, folder))
        return {"router": ours, "vllm_router": asyncio.run(run(PEER, folder)) if arguments.peers else None}

    report = measured("failover", measure)
    report |= {
        "broken_promises": broken_promises(report["router"]),
        "settings": {"requests": REQUESTS, "at_once": AT_ONCE, "first_byte_s": FIRST_BYTE_S},
        "lost_at_most": LOST_MAX,
        "machine": machine.describe(),
    }
    show(report, arguments.out, json.dumps(report) if arguments.json else table(report))
    return 3 if arguments.check and report["broken_promises"] else 0


if __name__ == "__main__":
    sys.exit(main())
