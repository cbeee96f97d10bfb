"""Requests on the wire: framing, encodings, and what of a client's connection stays on it."""

import json

import pytest

from tests.http.door import App, all_read, code_of, serving
from tests.http.scripted import COMPLETION, ScriptedEngine, says
from tests.http.setting import chat_body
from tests.http.stack import Stack, fresh
from tests.http.wire import Wire, exchange, request
from tests.upstream.fakes import Connection, SeenRequest, answer, piece

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


# -- a wish for another protocol ------------------------------------------------------------------------------------

#: As Java's HttpClient and `curl --http2` send it.
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"
UPGRADES = {
    "length": UPGRADE + b"content-length: 6\r\n\r\nabcdef",
    "chunked": UPGRADE + b"transfer-encoding: chunked\r\n\r\n" + piece(b"abc") + piece(b"def") + piece(b""),
    "websocket": b"connection: keep-alive, Upgrade\r\nupgrade: websocket\r\ncontent-length: 6\r\n\r\nabcdef",
}


@pytest.mark.parametrize("wish", UPGRADES.values(), ids=UPGRADES)
async def test_a_request_that_asks_for_an_upgrade_is_served_as_though_it_did_not(wish: bytes) -> None:
    app = App()
    asking = b"POST /x?y=1 HTTP/1.1\r\nHost: r\r\nX-A: b\r\n" + wish
    async with serving(app) as port, Wire(port) as wire:
        seen = []
        for cut in (0, 5, len(asking) - 8, len(asking) - 2):
            await wire.send(asking[:cut])
            await all_read(port)
            await wire.send(asking[cut:])
            status, headers, _ = await wire.answer()
            seen.append((status, headers.get("connection"), app.paths[-1], app.body, dict(app.headers)[b"x-a"]))

    assert seen == [(200, None, "/x", b"abcdef", b"b")] * 4


async def test_a_body_whose_head_asks_for_an_upgrade_has_the_same_bounds() -> None:
    async with serving(App(), upload_idle_s=0.1) as port:
        late = await exchange(port, b"POST / HTTP/1.1\r\nhost: r\r\n" + UPGRADE + b"content-length: 2\r\n\r\na")
        large = await exchange(port, b"POST / HTTP/1.1\r\nhost: r\r\nx: " + b"x" * 70_000 + b"\r\n" + UPGRADE + b"\r\n")
        closing = UPGRADE.replace(b"Upgrade, ", b"close, Upgrade, ")
        closed = await exchange(port, b"GET / HTTP/1.1\r\nhost: r\r\n" + closing + b"\r\n")
        second = await exchange(port, (b"GET / HTTP/1.1\r\nhost: r\r\n" + UPGRADE + b"\r\n") * 2)

    assert late == b""
    assert code_of(large) == (431, "request_headers_too_large")
    assert b"\r\nconnection: close\r\n" in closed
    assert second.count(b"HTTP/1.1 200") == 1


async def test_the_engine_gets_the_body_and_nothing_of_the_wish(stack: Stack) -> None:
    lines = [line for line in UPGRADE.decode().split("\r\n") if line]

    async with Wire(stack.port) as wire:
        await wire.send(request("/v1/chat/completions", BODY, headers=lines))
        status, headers, _ = await wire.answer()

    entry = next(e for e in stack.entries("c") + stack.entries("l") if e.x_request_id == headers["x-request-id"])
    assert status == 200
    assert entry.body == BODY
    assert not {"upgrade", "connection", "http2-settings"} & set(entry.headers) - {"connection"}


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


@pytest.mark.parametrize("upgrade", [b"", UPGRADE], ids=["plain", "upgrade"])
@pytest.mark.parametrize("framing", SMUGGLED.values(), ids=SMUGGLED)
async def test_a_request_whose_end_is_in_doubt_is_refused_and_its_connection_closed(
    stack: Stack, framing: bytes, upgrade: bytes
) -> None:
    sent_before = len(stack.entries("c")) + len(stack.entries("l"))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n"

    answers = await exchange(stack.port, head + upgrade + framing)

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


@pytest.mark.parametrize("encoding", ["br", "deflate", "zstd", "gzip, gzip", "identity, gzip"])
async def test_a_body_of_another_compression_than_gzip_is_refused_before_it_is_read(
    stack: Stack, encoding: str
) -> None:
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
