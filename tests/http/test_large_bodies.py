"""Bodies of every size: up to the limit they are served, above it refused early, and the loop never stops for them.

Sizes are a twentieth of what one would really send.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from router.http.inbound import InboundProtocol
from tests.http.scripted import Answering, ScriptedEngine, says
from tests.http.setting import CHAT_TOKENS, LONG_TOKENS, chat_body
from tests.http.stack import Stack, new_client, stack_of, until
from tests.http.stage import Stage
from tests.http.wire import Wire, request
from tests.upstream.fakes import Connection, SeenRequest

MIB = 2**20
BODY_MAX = 6 * MIB


@dataclass
class Bounded:
    """A router with a bound on bodies, before engines that answer whatever comes."""

    stack: Stack
    engines: tuple[ScriptedEngine, ScriptedEngine]

    @property
    def calls(self) -> list[SeenRequest]:
        return [call for engine in self.engines for call in engine.calls]

    def answer_with(self, answering: Answering) -> None:
        for engine in self.engines:
            engine.answering = answering


async def silent(_: SeenRequest, connection: Connection) -> None:
    await connection.closed()


@pytest.fixture(scope="module")
def bounded_stack(stage: Stage) -> Bounded:
    server = {"body_max_bytes": BODY_MAX, "buffered_max_bytes": 3 * BODY_MAX}
    c, long = (ScriptedEngine(says(), max_model_len=length) for length in (CHAT_TOKENS, LONG_TOKENS))
    return Bounded(stage.start(stack_of(c=c, long=long, server=server)), (c, long))


@pytest.fixture
def bounded(stage: Stage, bounded_stack: Bounded) -> Iterator[Bounded]:
    yield bounded_stack
    bounded_stack.answer_with(says())
    stage.run(bounded_stack.stack.check_at_rest())
    for engine in bounded_stack.engines:
        engine.calls.clear()


def with_image(size: int) -> bytes:
    """A chat whose body has exactly `size` bytes, nearly all of them an image."""

    def body(filling: int) -> bytes:
        url = "data:image/png;base64," + "A" * filling
        parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}]
        return json.dumps({**chat_body(max_tokens=2), "messages": [{"role": "user", "content": parts}]}).encode()

    return body(size - len(body(0)))


async def chunked(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 100_000):
        yield data[start : start + 100_000]


@pytest.mark.parametrize("size", [150_000, MIB, BODY_MAX])
async def test_an_image_chat_up_to_the_limit_is_served(bounded: Bounded, size: int) -> None:
    answer = await bounded.stack.post("/v1/chat/completions", with_image(size))

    assert answer.status_code == 200
    assert [len(call.body) for call in bounded.calls] == [size]


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_one_byte_above_the_limit_is_a_413(bounded: Bounded, framing: str) -> None:
    body = with_image(BODY_MAX + 1)

    content: Any = body if framing == "length" else chunked(body)
    answer = await bounded.stack.client.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert f"{BODY_MAX:,}" in answer.json()["error"]["message"]


async def test_a_declared_length_above_the_limit_is_refused_before_a_byte_of_it_is_sent(bounded: Bounded) -> None:
    async with Wire(bounded.stack.port) as wire:
        await wire.send(
            request("/v1/chat/completions")[:-4].replace(b"content-length: 0", b"content-length: 99999999999")
        )
        await wire.send(b"\r\ncontent-type: application/json\r\n\r\n")
        status, _, body = await wire.answer()

    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")


async def test_an_upload_that_stops_half_way_and_leaves_reaches_no_engine_and_is_nobodys_fault(
    bounded: Bounded, caplog: pytest.LogCaptureFixture
) -> None:
    before = await bounded.stack.metrics()
    whole = request("/v1/chat/completions", with_image(MIB))

    for leave in ("reset", "close"):
        async with Wire(bounded.stack.port) as wire:
            await wire.send(whole[:100_000])
            await until(lambda: bounded.stack.runtime.state.in_flight == 1)
            if leave == "reset":
                wire.reset()
        await until(lambda: bounded.stack.runtime.state.in_flight == 0)

    after = await bounded.stack.metrics()
    left = "client_left_upload"
    assert after.value("router_requests_total", outcome=left) - before.value("router_requests_total", outcome=left) == 2
    assert bounded.calls == []
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_bodies_beyond_what_the_process_may_hold_are_a_429_until_others_are_done(bounded: Bounded) -> None:
    bounded.answer_with(silent)
    body = with_image(BODY_MAX)
    holders = [asyncio.create_task(bounded.stack.post("/v1/chat/completions", body)) for _ in range(3)]
    await until(lambda: bounded.stack.runtime.state.buffers.used_bytes == 3 * BODY_MAX)

    refused = await bounded.stack.chat()
    for holder in holders:
        holder.cancel()
    await asyncio.wait(holders)
    await until(lambda: bounded.stack.runtime.state.in_flight == 0)
    bounded.answer_with(says())
    served = await bounded.stack.chat(max_tokens=2)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "request_buffers_full")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert served.status_code == 200


async def test_health_and_streams_go_on_while_large_prompts_are_read_and_counted(bounded: Bounded) -> None:
    """Ten chats of 250 KB at once beside a short one and a poll of the health page, all in one process."""
    large = chat_body("The quick brown fox jumps over the lazy dog. " * 5_500, max_tokens=2)
    gaps: list[float] = []
    stop = asyncio.Event()

    async def poll() -> None:
        async with new_client(bounded.stack.url) as client:
            while not stop.is_set():
                started_s = time.monotonic()
                assert (await client.get("/healthz")).status_code == 200
                gaps.append(time.monotonic() - started_s)

    polling = asyncio.create_task(poll())
    answers = await asyncio.gather(
        *(bounded.stack.post("/v1/chat/completions", large) for _ in range(10)), bounded.stack.chat(max_tokens=50)
    )
    stop.set()
    await polling

    assert {answer.status_code for answer in answers} == {200}
    # A bound on a frozen loop, far above what is measured (some ten milliseconds).
    assert max(gaps) < 5.0


async def test_an_upload_that_goes_silent_is_told_so_and_its_connection_closed(
    bounded: Bounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InboundProtocol, "upload_idle_s", 0.05)
    whole = request("/v1/chat/completions", with_image(MIB))

    async with Wire(bounded.stack.port) as wire:
        await wire.send(whole[:1_000])
        status, headers, body = await wire.answer()
        rest = await wire.rest()

    assert (status, json.loads(body)["error"]["code"]) == (408, "upload_timeout")
    assert headers["connection"] == "close"
    assert rest == b""
    assert bounded.calls == []
