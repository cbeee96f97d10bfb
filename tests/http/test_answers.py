"""What an engine's answer looks like on the wire to the client: framing, encodings, and what breaks off."""

import asyncio
import gzip
import json
import zlib

import pytest

from router.upstream.sse import EventSplitter
from tests.http.scripted import COMPLETION, DONE, ScriptedEngine, chunk, says, streams
from tests.http.setting import chat_body
from tests.http.stack import Stack, new_client
from tests.http.wire import Wire, request
from tests.upstream.fakes import STREAM_HEAD, Connection, SeenRequest, answer, piece

BODY = json.dumps(chat_body(max_tokens=2)).encode()
JSON_HEADER = "content-type: application/json\r\n"

ENCODED = {
    "plain": (COMPLETION, ""),
    "gzip": (gzip.compress(COMPLETION), "content-encoding: gzip\r\n"),
    "deflate": (zlib.compress(COMPLETION), "content-encoding: deflate\r\n"),
}


@pytest.mark.parametrize("accepted", ["gzip", "identity", None])
@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_an_answer_in_any_framing_and_encoding_can_be_read(
    raw: tuple[Stack, ScriptedEngine], encoding: str, framing: str, accepted: str | None
) -> None:
    stack, engine = raw
    body, header = ENCODED[encoding]

    async def answering(_: SeenRequest, connection: Connection) -> None:
        if framing == "length":
            await connection.send(answer(body, headers=JSON_HEADER + header))
        elif framing == "chunked":
            head = f"HTTP/1.1 200 OK\r\n{JSON_HEADER}{header}transfer-encoding: chunked\r\n\r\n".encode()
            await connection.send(head + piece(body[:20]) + piece(body[20:]) + piece(b""))
        else:
            await connection.send(f"HTTP/1.1 200 OK\r\n{JSON_HEADER}{header}connection: close\r\n\r\n".encode() + body)
            connection.writer.close()

    engine.answering = answering
    headers = {} if accepted is None else {"accept-encoding": accepted}
    async with Wire(stack.port) as wire:
        lines = [f"{name}: {value}" for name, value in headers.items()]
        await wire.send(request("/v1/chat/completions", BODY, headers=lines))
        status, seen, raw_body = await wire.answer()

    assert (status, seen.get("content-encoding", "plain")) == (200, encoding)
    assert int(seen["content-length"]) == len(raw_body)
    decoded = raw_body if encoding == "plain" else zlib.decompress(raw_body, 47)
    assert decoded == COMPLETION


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_compressed_refusal_of_an_engine_is_readable(raw: tuple[Stack, ScriptedEngine], encoding: str) -> None:
    stack, engine = raw
    said = b'{"error":{"message":"too hot","type":"BadRequestError","param":"temperature","code":400}}'
    body = gzip.compress(said) if encoding == "gzip" else zlib.compress(said)
    engine.answering = says(body, status=400, headers=f"{JSON_HEADER}content-encoding: {encoding}\r\n")

    refused = await stack.chat()

    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "too hot")


async def test_a_compressed_stream_is_passed_on_as_it_comes(raw: tuple[Stack, ScriptedEngine]) -> None:
    stack, engine = raw
    packer = zlib.compressobj(wbits=31)
    seen_first = asyncio.Event()

    async def answering(_: SeenRequest, connection: Connection) -> None:
        await connection.send(STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n"))
        await connection.send(piece(packer.compress(chunk("a")) + packer.flush(zlib.Z_SYNC_FLUSH)))
        await seen_first.wait()
        await connection.send(piece(packer.compress(chunk("b") + DONE) + packer.flush()) + piece(b""))

    engine.answering = answering
    body = chat_body(stream=True)
    async with (
        new_client(stack.url) as client,
        client.stream("POST", "/v1/chat/completions", json=body, headers={"accept-encoding": "gzip"}) as stream,
    ):
        text = ""
        async for part in stream.aiter_text():
            text += part
            seen_first.set()

    assert text.encode() == chunk("a") + chunk("b") + DONE


async def test_a_stream_tells_proxies_not_to_hold_it_back(raw: tuple[Stack, ScriptedEngine]) -> None:
    stack, engine = raw
    engine.answering = streams(chunk("a"), DONE)

    answer = await stack.chat(stream=True)

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in answer.headers
    assert answer.headers.get("transfer-encoding") == "chunked"
    assert answer.content == chunk("a") + DONE


@pytest.mark.parametrize("cut", ["before the answer", "in the answer", "in the headers"])
async def test_a_plain_answer_that_breaks_off_is_never_taken_for_a_whole_one(
    raw: tuple[Stack, ScriptedEngine], cut: str
) -> None:
    stack, engine = raw
    big = b'{"x":"' + b"y" * 3_000_000 + b'"}'

    async def answering(_: SeenRequest, connection: Connection) -> None:
        if cut == "in the answer":
            await connection.send(answer(big)[:-1_000])
        elif cut == "in the headers":
            await connection.send(b"HTTP/1.1 200 OK\r\ncontent-le")
        connection.reset()

    engine.answering = answering
    async with Wire(stack.port) as wire:
        await wire.send(request("/v1/chat/completions", BODY))
        status, headers = await wire.head()
        rest = await wire.rest() if cut == "in the answer" else b""

    page = await stack.metrics()
    if cut == "in the answer":
        assert status == 200
        assert len(rest) < int(headers["content-length"])
        assert b"error" not in rest
        assert page.value("router_requests_total", outcome="engine_lost_streaming") >= 1
    else:
        assert status == 502
    assert page.value("router_requests_total", outcome="internal_error") == 0


async def test_a_stream_that_breaks_off_ends_with_one_well_formed_error_event(
    raw: tuple[Stack, ScriptedEngine],
) -> None:
    stack, engine = raw

    async def answering(_: SeenRequest, connection: Connection) -> None:
        await connection.send(STREAM_HEAD + piece(chunk("a")) + piece(b'data: {"choices":[{"ind'))
        connection.reset()

    engine.answering = answering
    answer = await stack.chat(stream=True)

    assert answer.content.startswith(chunk("a"))
    events = answer.content.removeprefix(chunk("a")).split(b"\n\n")
    assert [event[:6] for event in events] == [b"data: ", b"data: ", b""]
    assert json.loads(events[0][6:])["error"]["code"] == "engine_lost"
    assert events[1] == b"data: [DONE]"


async def test_a_bug_amid_a_stream_ends_the_call_as_one(
    raw: tuple[Stack, ScriptedEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stack, engine = raw
    go_on = asyncio.Event()

    async def answering(_: SeenRequest, connection: Connection) -> None:
        await connection.send(STREAM_HEAD + piece(chunk("a")))
        await go_on.wait()
        await connection.send(piece(chunk("b")))

    def bug(*_: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(EventSplitter, "split_plain", bug)
    engine.answering = answering
    before = (await stack.metrics()).value("router_requests_total", outcome="internal_error")
    async with Wire(stack.port) as wire:
        await wire.send(request("/v1/chat/completions", json.dumps(chat_body(stream=True)).encode()))
        await wire.reader.readuntil(piece(chunk("a")))
        go_on.set()
        rest = await wire.reader.readuntil(piece(b""))

    assert b'"internal_error"' in rest
    assert (await stack.metrics()).value("router_requests_total", outcome="internal_error") == before + 1
    assert "failed inside the router" in caplog.text
