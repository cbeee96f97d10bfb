"""Bytes on the wire, both ways: framing, encodings, and what of a connection stays on it."""

import asyncio
import gzip
import json
import zlib

import pytest

from tests.http.scripted import COMPLETION, DONE, ScriptedEngine, chunk, says, streams
from tests.http.stack import Stack, chat_body, fresh, new_client
from tests.http.wire import Wire, exchange, request
from tests.upstream.fakes import STREAM_HEAD, Connection, SeenRequest, answer, piece

BODY = json.dumps(chat_body(max_tokens=2)).encode()
JSON_HEADER = "content-type: application/json\r\n"


# -- towards the engine ----------------------------------------------------------------------------------------------


async def test_nothing_that_belongs_to_the_clients_connection_reaches_the_engine() -> None:
    engine = ScriptedEngine(says())
    hop_by_hop = [
        "connection: keep-alive, X-Drop",
        "x-drop: 1",
        "te: trailers",
        "keep-alive: timeout=5",
        "proxy-authorization: Basic eA==",
        "proxy-connection: keep-alive",
        "upgrade: h2c",
        "trailer: x",
        "cookie: session=1",
        "accept-encoding: gzip, br",
        "forwarded: for=1.2.3.4",
        "x-forwarded-host: evil.test",
        "x-router-pool: batch",
        "x-kept: yes",
    ]

    async with fresh(c=engine) as stack:
        async with Wire(stack.port) as wire:
            await wire.send(request("/v1/chat/completions", BODY, headers=hop_by_hop, host="evil.test"))
            status, _, _ = await wire.answer()

        (call,) = engine.calls
        names = {name for name, _ in call.headers}
        assert status == 200
        assert names == {"host", "accept-encoding", "content-length", "content-type", "x-kept", "x-request-id"}
        assert call.all("host")[0].startswith("127.0.0.1:")
        assert call.all("accept-encoding") == ["identity"]
        assert call.all("content-length") == [str(len(BODY))]


async def test_a_chunked_body_reaches_the_engine_with_one_length() -> None:
    engine = ScriptedEngine(says())
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n"
    half = len(BODY) // 2

    async with fresh(c=engine) as stack:
        async with Wire(stack.port) as wire:
            await wire.send(head + b"transfer-encoding: chunked\r\n\r\n" + piece(BODY[:half]))
            await wire.send(piece(BODY[half:]) + piece(b""))
            status, _, _ = await wire.answer()

        assert status == 200
        assert engine.calls[0].body == BODY
        assert engine.calls[0].all("transfer-encoding") == []
        assert engine.calls[0].all("content-length") == [str(len(BODY))]


async def test_fifty_requests_on_one_connection_use_few_connections_to_the_engine() -> None:
    connections: set[int] = set()

    async def answering(_: SeenRequest, connection: Connection) -> None:
        connections.add(connection.number)
        await connection.send(answer(COMPLETION))

    async with fresh(c=ScriptedEngine(answering)) as stack:
        async with Wire(stack.port) as wire:
            statuses = []
            for _ in range(50):
                await wire.send(request("/v1/chat/completions", BODY))
                statuses.append((await wire.answer())[0])
            await wire.send(request("/v1/models", method="GET"))
            models, _, _ = await wire.answer()

        assert (statuses, models) == ([200] * 50, 200)
        assert len(connections) <= 3


# -- smuggling -------------------------------------------------------------------------------------------------------

HIDDEN = request("/v1/chat/completions", BODY)
SMUGGLED = {
    "both framings": b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "both framings, other order": b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": b"content-length: 4\r\ncontent-length: 5\r\n\r\nabcde" + HIDDEN,
    "two lengths in one": b"content-length: 4, 5\r\n\r\nabcde" + HIDDEN,
    "signed length": b"content-length: +4\r\n\r\nabcd" + HIDDEN,
    "unknown coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "coding after chunked": b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "space in name": b"content-length : 4\r\n\r\nabcd" + HIDDEN,
    "space before name": b" content-length: 4\r\n\r\nabcd" + HIDDEN,
    "bad chunk size": b"transfer-encoding: chunked\r\n\r\n0x4\r\nabcd\r\n0\r\n\r\n" + HIDDEN,
    "negative chunk size": b"transfer-encoding: chunked\r\n\r\n-4\r\nabcd\r\n0\r\n\r\n" + HIDDEN,
    "NUL in a value": b"x-a: a\x00b\r\ncontent-length: 4\r\n\r\nabcd" + HIDDEN,
}


@pytest.mark.parametrize("framing", SMUGGLED.values(), ids=SMUGGLED)
async def test_a_request_whose_end_is_in_doubt_is_refused_and_its_connection_closed(
    stack: Stack, framing: bytes
) -> None:
    sent_before = len(stack.entries("c")) + len(stack.entries("l"))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n"

    answers = await exchange(stack.port, head + framing)

    assert answers.startswith(b"HTTP/1.1 400")
    assert answers.count(b"HTTP/1.1 ") == 1
    assert len(stack.entries("c")) + len(stack.entries("l")) == sent_before


async def test_bare_line_feeds_never_yield_more_than_one_request(stack: Stack) -> None:
    sent_before = len(stack.entries("c"))

    answers = await exchange(
        stack.port,
        b"POST /v1/chat/completions HTTP/1.1\nhost: r\ncontent-length: 0\nconnection: close\n\n" + HIDDEN,
    )

    assert answers.count(b"HTTP/1.1 ") == 1
    assert b" 400 " in answers.splitlines()[0] or b" 415 " in answers.splitlines()[0]
    assert len(stack.entries("c")) == sent_before


# -- uploads ---------------------------------------------------------------------------------------------------------


async def test_a_client_that_asks_first_is_told_to_go_on_and_is_served(stack: Stack) -> None:
    whole = request("/v1/chat/completions", BODY, headers=["expect: 100-continue"])

    async with Wire(stack.port) as wire:
        await wire.send(whole[: -len(BODY)])
        go_on = await wire.reader.readuntil(b"\r\n\r\n")
        await wire.send(BODY)
        status, _, _ = await wire.answer()

    assert go_on == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert status == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "zstd", "gzip, gzip"])
async def test_a_compressed_body_is_refused_before_it_is_read(stack: Stack, encoding: str) -> None:
    headers = [f"content-encoding: {encoding}", "expect: 100-continue"]

    async with Wire(stack.port) as wire:
        await wire.send(request("/v1/chat/completions", b"x" * 100, headers=headers)[:-100])
        status, _, body = await wire.answer()

    assert status == 415
    assert json.loads(body)["error"]["code"] == "unsupported_content_encoding"


async def test_an_identity_encoding_is_no_compression(stack: Stack) -> None:
    answer = await stack.post("/v1/chat/completions", BODY, headers={"content-encoding": "identity"})

    assert answer.status_code == 200


async def test_with_a_wrong_key_nobody_asks_for_the_body() -> None:
    async with fresh(keys=[{"name": "k", "key": "right"}]) as stack:
        whole = request("/v1/chat/completions", BODY, headers=["expect: 100-continue", "authorization: Bearer wrong"])

        async with Wire(stack.port) as wire:
            await wire.send(whole[: -len(BODY)])
            status, _ = await wire.head()

        assert status == 401


# -- towards the client ----------------------------------------------------------------------------------------------

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
