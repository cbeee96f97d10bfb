"""Answers on the wire, of an app that says exactly what a test wants: framing, one write, back-pressure, bad apps."""

import asyncio
import contextlib

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.exchange import EXTENSION
from router.http.upload import BufferBudget
from tests.http.door import App, serving
from tests.http.stack import still, until
from tests.http.test_client_side import connect
from tests.http.wire import Wire, exchange, request

TEXT = (b"content-type", b"text/plain")
OK = {"type": "http.response.start", "status": 200, "headers": [TEXT]}
GET = request("/", method="GET")
CLOSING = request("/", method="GET", headers=["connection: close"])


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [TEXT, *headers]}


def body(data: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def saying(*messages: Message) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


def head_and_rest(answer: bytes) -> tuple[list[bytes], bytes]:
    head, _, rest = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n"), rest


# -- framing ---------------------------------------------------------------------------------------------------------


async def test_an_answer_of_known_length_is_written_at_once_and_as_it_is() -> None:
    async with serving(saying(start(200, (b"content-length", b"5")), body(b"hello"))) as port:
        lines, rest = head_and_rest(await exchange(port, CLOSING))

    assert lines == [
        b"HTTP/1.1 200 OK",
        b"content-type: text/plain",
        b"content-length: 5",
        b"connection: close",
    ]
    assert rest == b"hello"


async def test_an_answer_of_unknown_length_is_chunked_one_message_a_chunk() -> None:
    app = saying(start(), body(b"a" * 17, more=True), body(b"", more=True), body(b"b", more=True), body(b"c"))

    async with serving(app) as port:
        lines, rest = head_and_rest(await exchange(port, CLOSING))

    assert b"transfer-encoding: chunked" in lines
    assert rest == b"11\r\n" + b"a" * 17 + b"\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n"


def test_head_and_body_of_a_whole_answer_are_one_write_and_a_streams_head_goes_out_alone() -> None:
    async def writes(*messages: Message) -> list[bytes]:
        seen: list[bytes] = []
        connection, pipe = connect(saying(*messages))
        pipe.write = seen.append  # type: ignore[method-assign]
        connection.data_received(GET)
        while connection.tasks:
            await asyncio.sleep(0)
        connection.connection_lost(None)
        return seen

    whole = asyncio.run(writes(start(200, (b"content-length", b"2")), body(b"ok")))
    stream = asyncio.run(writes(start(), body(b"one", more=True), body(b"two")))

    assert len(whole) == 1
    assert whole[0].endswith(b"\r\n\r\nok")
    assert [data[-3:] for data in stream] == [b"\n\r\n", b"e\r\n", b"\n\r\n"]
    assert stream[1:] == [b"3\r\none\r\n", b"3\r\ntwo\r\n0\r\n\r\n"]


async def test_the_head_of_a_stream_goes_out_before_its_first_byte_is_there() -> None:
    may_go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        await may_go_on.wait()
        await send(body(b"late"))

    async with serving(app) as port, Wire(port) as wire:
        await wire.send(GET)
        status, headers = await wire.head()
        may_go_on.set()
        rest = await wire.reader.readuntil(b"0\r\n\r\n")

    assert (status, headers["transfer-encoding"]) == (200, "chunked")
    assert rest == b"4\r\nlate\r\n0\r\n\r\n"


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_answer_without_a_body_has_none_and_the_connection_goes_on(status: int, method: str) -> None:
    async with serving(saying(start(status), body(b""))) as port, Wire(port) as wire:
        await wire.send(request("/", method=method))
        first = await wire.head()
        await wire.send(request("/", method=method))
        second = await wire.head()

    assert first[0] == second[0] == status
    assert {"transfer-encoding", "content-length"}.isdisjoint(first[1])


@pytest.mark.parametrize("headers", [[(b"content-length", b"5")], []], ids=["length", "no length"])
async def test_head_has_the_headers_and_no_body(headers: list[tuple[bytes, bytes]]) -> None:
    async with serving(saying(start(200, *headers), body(b"hello"))) as port, Wire(port) as wire:
        await wire.send(request("/", method="HEAD"))
        await wire.send(request("/", method="HEAD", headers=["connection: close"]))
        answers = await wire.rest()

    assert b"hello" not in answers
    assert b"transfer-encoding" not in answers
    assert answers.count(b"content-length: 5") == answers.count(b"HTTP/1.1 200") * len(headers)


async def test_http_1_0_gets_no_chunks_and_a_connection_that_ends() -> None:
    async with serving(saying(start(), body(b"one", more=True), body(b"two"))) as port:
        lines, rest = head_and_rest(
            await exchange(port, b"GET / HTTP/1.0\r\nconnection: keep-alive\r\nexpect: 100-continue\r\n\r\n")
        )

    assert lines == [b"HTTP/1.1 200 OK", b"content-type: text/plain", b"connection: close"]
    assert rest == b"onetwo"


async def test_what_an_app_says_of_the_connection_holds_and_is_said_once() -> None:
    async with serving(saying(start(200, (b"Connection", b"Close"), (b"Content-Length", b"0")), body(b""))) as port:
        lines, _ = head_and_rest(await exchange(port, GET))

    assert lines.count(b"connection: close") == 1
    assert lines.count(b"content-length: 0") == 1


async def test_the_scope_is_what_asgi_says() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await saying(start(200, (b"content-length", b"0")), body(b""))(scope, receive, send)

    async with serving(app) as port, Wire(port) as wire:
        await wire.send(request("/a%20b?c=%20d", method="PATCH", headers=["X-A: B", "x-a: C"]))
        await wire.head()

    (scope,) = seen
    assert (scope["type"], scope["http_version"], scope["method"], scope["scheme"]) == ("http", "1.1", "PATCH", "http")
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == ("/a b", b"/a%20b", b"c=%20d")
    assert scope["headers"][-2:] == [(b"x-a", b"B"), (b"x-a", b"C")]
    assert (scope["root_path"], scope["server"][1], scope["client"][0]) == ("", port, "127.0.0.1")


# -- apps with bugs --------------------------------------------------------------------------------------------------

BUGS: dict[str, tuple[Message, ...]] = {
    "says nothing": (),
    "body first": (body(b"x"),),
    "line end in a value": (start(200, (b"x-a", b"b\r\nx-c: d")), body(b"x")),
    "NUL in a value": (start(200, (b"x-a", b"b\0")), body(b"x")),
    "line end in a name": (start(200, (b"x-a: b\r\nx-c", b"d")), body(b"x")),
    "space in a name": (start(200, (b"x a", b"d")), body(b"x")),
    "no name": (start(200, (b"", b"d")), body(b"x")),
    "two lengths": (start(200, (b"content-length", b"1"), (b"content-length", b"2")), body(b"x")),
    "body too long": (start(200, (b"content-length", b"1")), body(b"xx")),
    "body too short": (start(200, (b"content-length", b"2")), body(b"x")),
    "only a start": (start(200, (b"content-length", b"2")),),
}


@pytest.mark.parametrize("messages", BUGS.values(), ids=BUGS)
async def test_an_app_that_breaks_the_rules_before_a_byte_is_out_is_a_500(
    messages: tuple[Message, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(saying(*messages)) as port:
        answer = await exchange(port, GET)

    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"connection: close" in answer
    assert b'"code": "internal_error"' in answer
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


@pytest.mark.parametrize(
    "messages",
    [
        (start(), body(b"x", more=True)),
        (start(), body(b"x", more=True), start()),
        (start(200, (b"content-length", b"9")), body(b"x", more=True)),
        (start(200, (b"content-length", b"9")), body(b"x", more=True), body(b"")),
    ],
    ids=["stream without end", "second start", "half a body", "ended too early"],
)
async def test_an_answer_that_breaks_off_ends_its_connection_and_cannot_pass_for_a_whole_one(
    messages: tuple[Message, ...],
) -> None:
    async with serving(saying(*messages)) as port:
        answer = await exchange(port, GET)

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"500" not in answer
    assert not answer.endswith(b"0\r\n\r\n")


# -- back-pressure ---------------------------------------------------------------------------------------------------


async def test_a_body_is_not_taken_from_the_socket_faster_than_the_app_reads_it() -> None:
    has_come, may_read = asyncio.Event(), asyncio.Event()
    total = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal total
        has_come.set()
        await may_read.wait()
        while (message := await receive())["more_body"]:
            total += len(message["body"])
            largest.append(len(message["body"]))
        total += len(message["body"])
        await saying(start(200, (b"content-length", b"0")), body(b""))(scope, receive, send)

    largest: list[int] = []
    size = 32 * 2**20
    async with serving(app) as port, Wire(port) as wire:
        whole = request("/", b"x" * size)
        wire.writer.write(whole)
        await has_come.wait()
        await still(wire.writer.transport.get_write_buffer_size)
        may_read.set()
        status, _ = await wire.head()

    assert status == 200
    assert total == size
    # One read of the socket may pass the mark of 64 KiB, not a second one.
    assert max(largest) <= 64 * 2**10 + 256 * 2**10


async def test_an_app_waits_for_a_client_that_does_not_read_and_goes_on_when_it_does() -> None:
    sent = 0
    size, pieces = 100_000, 300

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send(start())
        for _ in range(pieces):
            await send(body(b"x" * size, more=True))
            sent += 1
        await send(body(b""))

    async with serving(app) as port, Wire(port) as wire:
        await wire.send(CLOSING)
        waiting_at = await still(lambda: sent)
        rest = await wire.rest()

    assert waiting_at < pieces
    assert sent == pieces
    assert rest.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("reads", [False, True])
async def test_only_a_client_that_takes_nothing_at_all_is_given_up(*, reads: bool) -> None:
    raised: list[type[BaseException]] = []
    is_given_up = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        try:
            for _ in range(300):
                await send(body(b"x" * 100_000, more=True))
        except ConnectionError as error:
            raised.append(type(error))
            is_given_up.set()
            raise
        await send(body(b""))

    async with serving(app, reader_stall_s=0.2) as port, Wire(port) as wire:
        await wire.send(CLOSING)
        if reads:
            rest = await wire.rest()
            assert rest.endswith(b"0\r\n\r\n")
        else:
            await is_given_up.wait()

    assert raised == ([] if reads else [ConnectionResetError])


# -- what is held for clients that do not read -----------------------------------------------------------------------

KIB = 1024


def streaming(pieces: int) -> ASGIApp:
    return saying(start(), *(body(b"x" * 100 * KIB, more=True) for _ in range(pieces)), body(b""))


async def test_what_a_client_does_not_read_is_counted_until_it_does() -> None:
    buffers = BufferBudget(1024 * KIB)
    async with serving(streaming(100), buffers=buffers) as port, Wire(port) as wire:
        await wire.send(CLOSING)
        await until(lambda: buffers.used_bytes > 0)
        held = buffers.used_bytes
        rest = await wire.rest()
        await until(lambda: buffers.used_bytes == 0)

    assert held == 384 * KIB
    assert rest.endswith(b"0\r\n\r\n")


async def test_clients_that_do_not_read_are_given_up_past_what_may_be_held_and_give_it_back() -> None:
    buffers = BufferBudget(1024 * KIB)
    async with serving(streaming(300), buffers=buffers) as port:
        async with contextlib.AsyncExitStack() as stack:
            stalled = [await stack.enter_async_context(Wire(port)) for _ in range(3)]
            for wire in stalled:
                await wire.send(CLOSING)
                await still(lambda: buffers.used_bytes)
            held = buffers.used_bytes
            rests = [await wire.rest() for wire in stalled]
        await until(lambda: buffers.used_bytes == 0)

    assert held == 2 * 384 * KIB
    assert [rest.endswith(b"0\r\n\r\n") for rest in rests] == [True, True, False]


async def test_who_reads_no_answer_cannot_ask_for_ever_more_of_them() -> None:
    answered = 0
    size = 100 * KIB

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal answered
        scope["extensions"][EXTENSION].answer(200, [TEXT], b"", b"x" * size)
        answered += 1

    async with serving(app) as port, Wire(port) as wire:
        for _ in range(400):
            # One after the other: what comes during a call would be pipelining.
            before = answered
            await wire.send(GET)
            await still(lambda: answered) if answered > 40 else await until(lambda before=before: answered > before)
            if answered == before:
                break
        stuck_at = answered
        for _ in range(stuck_at):
            await wire.answer()
        await wire.answer()

    assert stuck_at < 400
    assert answered == stuck_at + 1


# -- expectations ----------------------------------------------------------------------------------------------------


async def test_an_answer_in_place_of_the_go_ahead_ends_the_connection() -> None:
    async with serving(saying(start(401, (b"content-length", b"0")), body(b""))) as port, Wire(port) as wire:
        await wire.send(request("/", b"abc", headers=["expect: 100-continue"])[:-3])
        status, headers = await wire.head()
        rest = await wire.rest()

    assert (status, headers["connection"], rest) == (401, "close", b"")


async def test_who_sends_the_body_unasked_is_not_asked_for_it_any_more() -> None:
    async with serving(App()) as port, Wire(port) as wire:
        await wire.send(request("/", b"abc", headers=["expect: 100-continue"]))
        status, headers, _ = await wire.answer()

    assert status == 200
    assert "connection" not in headers


async def test_a_large_refusal_reaches_a_client_that_is_still_sending() -> None:
    """It would be lost in a reset if the connection were closed over unread bytes."""
    app = saying(start(413, (b"content-length", b"100000"), (b"connection", b"close")), body(b"x" * 100_000))

    async with serving(app) as port, Wire(port) as wire:
        wire.writer.write(request("/", b"y" * 2_000_000))
        status, _, said = await wire.answer()

    assert (status, len(said)) == (413, 100_000)


# -- many ------------------------------------------------------------------------------------------------------------


async def test_five_hundred_connections_stream_at_once_and_all_are_answered() -> None:
    all_here, count = asyncio.Event(), 500
    begun = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal begun
        await receive()
        await send(start())
        begun += 1
        if begun == count:
            all_here.set()
        await all_here.wait()
        for number in range(3):
            await send(body(b"%d" % number, more=True))
        await send(body(b""))

    async def one(port: int) -> bytes:
        return await exchange(port, CLOSING)

    async with serving(app) as port:
        answers = await asyncio.gather(*(one(port) for _ in range(count)))

    assert {answer.partition(b"\r\n\r\n")[2] for answer in answers} == {b"1\r\n0\r\n1\r\n1\r\n1\r\n2\r\n0\r\n\r\n"}


@pytest.mark.parametrize("cut", range(1, len(request("/", b"abcdef")), 7))
async def test_a_request_cut_anywhere_is_read_as_one(cut: int) -> None:
    app = App()
    whole = request("/", b"abcdef")

    async with serving(app) as port, Wire(port) as wire:
        await wire.send(whole[:cut])
        await asyncio.sleep(0)
        await wire.send(whole[cut:])
        status, _, said = await wire.answer()

    assert (status, said, app.body) == (200, b"ok", b"abcdef")
