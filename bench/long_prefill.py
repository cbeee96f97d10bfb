"""Answers that take their time, and engines that never give one: python bench/long_prefill.py [--scale 1]

At --scale 1 with the router's default limits and the times below; a smaller scale shortens both alike. All cases run at
one time, each a long request to one engine:

    stream_with_comments   30 min of prefill, the engine sends a comment every 15 s: the client never goes without a
                           byte for as long as the proxies' usual 60 s
    stream_without         the same prefill in silence
    plain                  the same prefill, no stream
    gap                    a minute of silence between two tokens
    never                  no byte at all: an error when `first_byte_s` is over
    never_plain            the same without a stream: status 504
    only_comments          comments and never a token: an error when `first_byte_s` is over
    cut_silence            tokens, then silence: an error event when `idle_s` is over

Exit codes: 0 all as it should be, 1 something could not be measured, 3 a case went wrong.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx

from bench import clients, machine
from bench.held_engine import event, held_engine, whole, write_head, write_whole
from bench.proxies import Proxy, router, router_config
from bench.script import measured, show

PREFILL_S = 1800.0
COMMENT_INTERVAL_S = 15.0
GAP_S = 60.0
#: The router's defaults for batch (docs/configuration.md).
FIRST_BYTE_S = 3600.0
IDLE_S = 120.0
COMMIT_AFTER_S = 30.0
#: Common proxies' limit for silence.
PROXY_SILENCE_S = 60.0
#: A plain answer has its first byte with its last token; the router allows 0.25 s for each that may come.
S_PER_OUTPUT_TOKEN = 0.25
MAX_TOKENS = 4
#: What a busy machine may be late by.
SLACK_S = 2.0
FOREVER_S = 1e9


class Times:
    """All times, at a scale."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.prefill_s = PREFILL_S * scale
        self.comment_interval_s = COMMENT_INTERVAL_S * scale
        self.gap_s = GAP_S * scale
        self.first_byte_s = FIRST_BYTE_S * scale
        self.idle_s = IDLE_S * scale

    def config(self, engines: list[Any]) -> dict[str, Any]:
        config = router_config(engines, log_level="info")
        # At full length the defaults themselves are what is tried.
        if self.scale != 1:
            model = config["models"][0]
            model["commit_after_s"] = COMMIT_AFTER_S * self.scale
            model["pools"]["batch"]["timeouts"] = {"first_byte_s": self.first_byte_s, "idle_s": self.idle_s}
        return config

    async def plot(self, fields: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """What the engine does with the request of each case, whose name is its prompt."""
        case = fields["messages"][0]["content"]
        if case in ("plain", "never_plain"):
            await asyncio.sleep(self.prefill_s if case == "plain" else FOREVER_S)
            write_whole(writer, whole("done"))
            await writer.drain()
            return
        write_head(writer)
        await writer.drain()
        if case == "stream_with_comments":
            await self._comment(writer, self.prefill_s)
        elif case == "only_comments":
            await self._comment(writer, FOREVER_S)
        elif case == "never":
            await asyncio.sleep(FOREVER_S)
        elif case == "stream_without":
            await asyncio.sleep(self.prefill_s)
        writer.write(event("one"))
        await writer.drain()
        if case in ("gap", "cut_silence"):
            await asyncio.sleep(self.gap_s if case == "gap" else FOREVER_S)
        writer.write(event(" two") + event(None, "stop") + b"data: [DONE]\n\n")
        await writer.drain()

    async def _comment(self, writer: asyncio.StreamWriter, for_s: float) -> None:
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            writer.write(b": keep-alive\n\n")
            await writer.drain()
            await asyncio.sleep(self.comment_interval_s)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one client got."""

    status: int
    text: str
    took_s: float
    longest_silence_s: float

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and ("[DONE]" in self.text or '"done"' in self.text) and not self.error_code

    @property
    def error_code(self) -> str | None:
        """Of the error body or event, where there is one."""
        for line in self.text.splitlines():
            said = line.removeprefix("data: ")
            if said.startswith("{") and "error" in (found := json.loads(said)):
                return str(found["error"]["code"])
        return None


async def watch(http: httpx.AsyncClient, url: str, case: str) -> Seen:
    body = clients.chat(case, is_stream="plain" not in case, max_tokens=MAX_TOKENS)
    began_s = last_s = time.monotonic()
    silence_s = 0.0
    text = b""
    headers = {"x-router-class": "batch"}
    async with http.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        # The head counts as a byte: it is what a proxy in between waits for first.
        silence_s, last_s = time.monotonic() - last_s, time.monotonic()
        async for chunk in answer.aiter_raw():
            now_s = time.monotonic()
            silence_s, last_s = max(silence_s, now_s - last_s), now_s
            text += chunk
        status = answer.status_code
    now_s = time.monotonic()
    return Seen(status, text.decode(), now_s - began_s, max(silence_s, now_s - last_s))


def faults(seen: dict[str, Seen], times: Times, log: str) -> list[str]:
    """What went wrong, in words."""
    wrong: list[str] = []

    def expect(is_so: bool, what: str) -> None:
        if not is_so:
            wrong.append(what)

    for case in ("stream_with_comments", "stream_without", "plain", "gap"):
        one = seen[case]
        expect(one.is_whole, f"{case}: not whole: status {one.status}, {one.text[-300:]}")
    silence_s = seen["stream_with_comments"].longest_silence_s
    limit_s = PROXY_SILENCE_S * times.scale + (SLACK_S if times.scale < 1 else 0.0)
    expect(silence_s < limit_s, f"stream_with_comments: {silence_s:.1f} s without a byte")
    plain_s = times.first_byte_s + S_PER_OUTPUT_TOKEN * MAX_TOKENS
    ends = {"never": times.first_byte_s, "never_plain": plain_s, "only_comments": times.first_byte_s}
    for case, limit_s in (ends | {"cut_silence": times.idle_s}).items():
        one = seen[case]
        expect(one.error_code == "engine_timeout", f"{case}: ended with {one.error_code}, status {one.status}")
        in_time = limit_s - SLACK_S <= one.took_s <= limit_s + SLACK_S
        expect(in_time, f"{case}: ended after {one.took_s:.1f} s, its limit is {limit_s:.1f} s")
    expect(seen["never_plain"].status == 504, f"never_plain: status {seen['never_plain'].status}")
    told = log.count('"engine_timeout"')
    expect(told >= 4, f"the log names engine_timeout {told} times, 4 requests ended so")
    return wrong


async def run(scale: float, folder: Path) -> dict[str, Any]:
    times = Times(scale)
    cases = ["stream_with_comments", "stream_without", "plain", "gap", "never", "never_plain", "only_comments"]
    cases.append("cut_silence")
    async with held_engine(times.plot) as engine:
        with contextlib.ExitStack() as stack:
            start = router(times.config([engine]), folder)
            proxy: Proxy = await asyncio.to_thread(stack.enter_context, start)
            sys.stderr.write(f"the longest case takes {times.first_byte_s + 1:.0f} s\n")
            async with clients.client(len(cases)) as http:
                async with asyncio.timeout(times.first_byte_s + 120):
                    all_seen = await asyncio.gather(*(watch(http, proxy.url, case) for case in cases))
            log = proxy.child.output
    seen = dict(zip(cases, all_seen, strict=True))
    return {
        "scale": scale,
        "cases": {
            case: {
                "status": one.status,
                "is_whole": one.is_whole,
                "error_code": one.error_code,
                "took_s": round(one.took_s, 2),
                "longest_silence_s": round(one.longest_silence_s, 2),
            }
            for case, one in seen.items()
        },
        "faults": faults(seen, times, log),
        "machine": machine.describe(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.01, help="1 is full length, an hour (0.01)")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()
    if not 0.005 <= arguments.scale <= 1:
        parser.error("--scale lies between 0.005 and 1")
    found = measured("long_prefill", lambda folder: asyncio.run(run(arguments.scale, folder)))
    show(found, arguments.out)
    return 3 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
