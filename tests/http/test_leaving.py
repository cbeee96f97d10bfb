"""Clients that leave, in every phase and every way, and clients that read slowly: seen at once, and held no longer."""

import asyncio
import gzip
import json
from typing import Any

import pytest

from tests.http.scripted import ScriptedEngine, chunk
from tests.http.setting import chat_body
from tests.http.stack import Stack, still, until
from tests.http.wire import Wire, request
from tests.upstream.fakes import STREAM_HEAD, Connection, SeenRequest, piece

PATH = "/v1/chat/completions"
BODY = json.dumps(chat_body("Hello there. " * 50, max_tokens=2)).encode()
STREAM = json.dumps(chat_body(stream=True)).encode()
WAYS = ["close", "reset", "half-close"]


async def leave(wire: Wire, how: str) -> None:
    if how == "reset":
        wire.reset()
    elif how == "half-close":
        wire.writer.write_eof()
    else:
        wire.writer.close()


async def outcomes(stack: Stack) -> dict[str, float]:
    """How many calls of each outcome there were."""
    return (await stack.metrics()).by("router_requests_total", "outcome")


async def new_outcomes(stack: Stack, before: dict[str, float]) -> dict[str, float]:
    await until(lambda: stack.runtime.state.in_flight == 0)
    after = await outcomes(stack)
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


class Telling:
    """An engine's script that says when its connection was closed."""

    def __init__(self, *said: bytes) -> None:
        self._said = said
        self.closed = asyncio.Event()

    async def __call__(self, _: SeenRequest, connection: Connection) -> None:
        for data in self._said:
            await connection.send(data)
        await connection.closed()
        self.closed.set()


def chunked(body: bytes) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    return head.encode() + piece(body[:100]) + piece(body[100:]) + piece(b"")


PACKED = gzip.compress(BODY)
UPLOADS = {
    "length": request(PATH, BODY),
    "chunks": chunked(BODY),
    "gzip": request(PATH, PACKED, headers=["content-encoding: gzip"]),
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("whole", UPLOADS.values(), ids=UPLOADS)
async def test_an_upload_that_is_cut_anywhere_reaches_no_engine(
    raw: tuple[Stack, ScriptedEngine], whole: bytes, how: str
) -> None:
    stack, engine = raw
    before = await outcomes(stack)
    head = whole.index(b"\r\n\r\n") + 4
    cuts = [head, head + 1, (head + len(whole)) // 2, len(whole) - 1]

    for cut in cuts:
        async with Wire(stack.port) as wire:
            await wire.send(whole[:cut])
            await until(lambda: stack.runtime.state.in_flight == 1)
            await leave(wire, how)
            await until(lambda: stack.runtime.state.in_flight == 0)

    assert await new_outcomes(stack, before) == {"client_left_upload": len(cuts)}
    assert engine.calls == []


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
async def test_a_client_that_leaves_in_prefill_has_its_engine_told(
    raw: tuple[Stack, ScriptedEngine], body: bytes, how: str
) -> None:
    stack, engine = raw
    engine.answering = telling = Telling()
    before = await outcomes(stack)

    async with Wire(stack.port) as wire:
        await wire.send(request(PATH, body))
        await until(lambda: len(engine.calls) == 1)
        await leave(wire, how)
        await telling.closed.wait()

    assert await new_outcomes(stack, before) == {"client_left_prefill": 1}


@pytest.mark.parametrize("how", WAYS)
async def test_a_client_that_leaves_a_stream_has_its_engine_told(raw: tuple[Stack, ScriptedEngine], how: str) -> None:
    stack, engine = raw
    engine.answering = telling = Telling(STREAM_HEAD, piece(chunk("a")))
    before = await outcomes(stack)

    async with Wire(stack.port) as wire:
        await wire.send(request(PATH, STREAM))
        await wire.head()
        await wire.reader.readuntil(chunk("a"))
        await leave(wire, how)
        await telling.closed.wait()

    assert await new_outcomes(stack, before) == {"client_left_streaming": 1}


async def test_a_client_that_reads_nothing_stops_its_engine_and_not_the_router(
    raw: tuple[Stack, ScriptedEngine],
) -> None:
    """What the engine gets rid of is what sockets hold, not what it could say."""
    stack, engine = raw
    said_bytes, event = 0, piece(chunk("a" * 60_000))
    said, closed = asyncio.Event(), asyncio.Event()

    async def torrent(_: SeenRequest, connection: Connection) -> None:
        nonlocal said_bytes
        try:
            await connection.send(STREAM_HEAD)
            while True:
                await connection.send(event)
                said_bytes += len(event)
                said.set()
        except ConnectionError:
            closed.set()

    async with Wire(stack.port) as wire:
        engine.answering = torrent
        await wire.send(request(PATH, STREAM))
        await said.wait()
        stopped_at = await still(lambda: said_bytes)
        engine.answering = Telling()
        said.clear()
        await wire.reader.readexactly(4 * 2**20)
        await said.wait()
        wire.reset()
        await closed.wait()

    assert stopped_at < 64 * 2**20


async def test_an_answer_that_nobody_reads_any_more_is_no_error_in_the_log(
    raw: tuple[Stack, ScriptedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    stack, engine = raw

    async def answering(_: SeenRequest, connection: Connection) -> None:
        wires.pop().reset()
        await connection.send(STREAM_HEAD)
        for _ in range(50):
            await connection.send(piece(chunk("a")))
        await connection.closed()

    engine.answering = answering
    wires: list[Any] = []
    for _ in range(20):
        async with Wire(stack.port) as wire:
            wires.append(wire)
            await wire.send(request(PATH, STREAM))
            await wire.rest()
    await until(lambda: stack.runtime.state.in_flight == 0)

    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
