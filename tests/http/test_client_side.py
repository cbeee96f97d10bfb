"""The client's side of a call alone: how long a body may take, when a client has left, and who hears of it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from router.errors import ApiError, ErrorShape
from router.http.client import ClientLeft, Reply, exchange_of, was_cut, watch
from router.http.inbound import InboundProtocol
from router.http.upload import BufferBudget, read_body
from router.request import RequestRecord
from tests.flow.jumping import JumpingLoop, run_on

PIECE_HEAD = b"POST / HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n"


def reply_to(send: Send) -> Reply:
    return Reply(send, RequestRecord("id", 0.0), ErrorShape.OPENAI)


class Pipe(asyncio.Transport):
    """A transport to nowhere: keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def write_eof(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class Reading:
    """An app that reads a body and keeps what came of it."""

    def __init__(self) -> None:
        self.budget = BufferBudget(10**8)
        self.length = 0
        self.refused: ApiError | None = None
        self.has_left = False
        self.over = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, {}, (), exchange_of(scope), 10**8, self.budget)
            self.length = len(body)
            self.budget.give_back(self.length)
        except ApiError as error:
            self.refused = error
        except ClientLeft:
            self.has_left = True
        self.over.set()
        await reply_to(send).fail(self.refused or ApiError(400, "over", "Over."))


async def upload(app: Reading, *, size_bytes: int, pause_s: float, pieces: int) -> Pipe:
    """Send a body in pieces of `size_bytes`, one each `pause_s`, until it is over."""
    connection, pipe = connect(app)
    connection.data_received(PIECE_HEAD)
    for _ in range(pieces):
        await asyncio.sleep(pause_s)
        if app.over.is_set():
            return pipe
        connection.data_received(b"%x\r\n" % size_bytes + b"x" * size_bytes + b"\r\n")
    connection.data_received(b"0\r\n\r\n")
    await app.over.wait()
    connection.connection_lost(None)
    return pipe


def connect(app: Any) -> tuple[InboundProtocol, Pipe]:
    """A connection to `app` in the running loop, and its other end."""
    config = uvicorn.Config(app, interface="asgi3", ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    connection, pipe = InboundProtocol(config, ServerState(), {}, asyncio.get_running_loop()), Pipe()
    connection.connection_made(pipe)
    return connection, pipe


def uploaded(loop: JumpingLoop, **pace: Any) -> Reading:
    async def test() -> Reading:
        app = Reading()
        await upload(app, **pace)
        return app

    return run_on(loop, test())


# -- bodies ----------------------------------------------------------------------------------------------------------


def test_a_body_that_never_pauses_long_and_never_ends_is_given_up_all_the_same() -> None:
    """One byte a minute, less a second: every pause is allowed, and the whole would take for ever."""
    loop = JumpingLoop()
    begun_at_s = loop.time_s

    app = uploaded(loop, size_bytes=1, pause_s=59.0, pieces=10**6)

    assert app.refused is not None
    assert (app.refused.status, app.refused.code) == (408, "upload_timeout")
    assert app.refused.headers == {"connection": "close"}
    assert loop.time_s - begun_at_s == pytest.approx(118.0, abs=0.1)
    assert app.budget.used_bytes == 0


def test_a_body_that_pauses_too_long_is_given_up_then() -> None:
    app = uploaded(JumpingLoop(), size_bytes=10**6, pause_s=61.0, pieces=2)

    assert app.refused is not None
    assert str(app.refused).startswith("408 upload_timeout: 0 bytes of the body came in 60 s")


def test_a_body_that_comes_faster_than_the_least_rate_may_take_as_long_as_it_needs() -> None:
    app = uploaded(JumpingLoop(), size_bytes=101_000, pause_s=10.0, pieces=100)

    assert (app.length, app.refused) == (100 * 101_000, None)


def test_a_body_that_comes_slower_than_the_least_rate_gets_what_its_bytes_earned() -> None:
    """5,000 bytes a second for 60 s of grace: it lasts 120 s, half of them earned."""
    loop = JumpingLoop()
    begun_at_s = loop.time_s

    app = uploaded(loop, size_bytes=5_000, pause_s=1.0, pieces=10**6)

    assert ",000 bytes of the body came in 1" in str(app.refused)
    assert loop.time_s - begun_at_s == pytest.approx(120.0, abs=2.0)


def test_a_body_that_came_with_its_head_is_read_without_a_wait() -> None:
    async def test() -> bytes:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"abc", "more_body": False}

        reading = read_body(receive, {}, (), None, 10, BufferBudget(10))
        try:
            reading.send(None)
        except StopIteration as end:
            return bytes(end.value)
        raise AssertionError("it waited")

    assert asyncio.run(test()) == b"abc"


# -- leaving ---------------------------------------------------------------------------------------------------------


class Working:
    """An app that reads its request and then works until it is stopped, watching its client."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self.has_left: bool | None = None
        self.task: asyncio.Task[Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.task = asyncio.current_task()
        await receive()
        try:
            watch(exchange_of(scope))
            self.begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.has_left = was_cut(exchange_of(scope))
            if not self.has_left:
                raise
        finally:
            self.ended.set()


Leave = Callable[[InboundProtocol], object]
LEAVING: dict[str, Leave] = {
    "end of file": lambda connection: connection.eof_received(),
    "reset": lambda connection: connection.connection_lost(ConnectionResetError()),
    "both": lambda connection: (connection.eof_received(), connection.connection_lost(None)),
}


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)
def test_a_client_that_leaves_ends_the_work_for_it(leave: Leave, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> Working:
        app = Working()
        connection, _ = connect(app)
        connection.data_received(b"GET / HTTP/1.1\r\nhost: r\r\n\r\n")
        await app.begun.wait()
        leave(connection)
        await app.ended.wait()
        return app

    app = asyncio.run(test())

    assert app.has_left
    assert [record.message for record in caplog.records] == []


def test_a_cancellation_from_elsewhere_stays_one_though_the_client_leaves_too() -> None:
    async def test() -> Working:
        app = Working()
        connection, _ = connect(app)
        connection.data_received(b"GET / HTTP/1.1\r\nhost: r\r\n\r\n")
        await app.begun.wait()
        assert app.task is not None
        app.task.cancel()
        connection.eof_received()
        await app.ended.wait()
        connection.connection_lost(None)
        return app

    app = asyncio.run(test())

    assert app.has_left is False


def test_a_client_that_left_before_it_was_watched_is_seen_at_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0)
        watch(exchange_of(scope))
        raise AssertionError("there is nobody to work for")

    async def test() -> bool:
        connection, _ = connect(app)
        connection.data_received(b"GET / HTTP/1.1\r\nhost: r\r\n\r\n")
        (task,) = connection.tasks
        connection.eof_received()
        await asyncio.wait({task})
        connection.connection_lost(None)
        return not connection.tasks

    assert asyncio.run(test())


def test_a_client_that_has_its_whole_answer_cannot_leave_any_more() -> None:
    async def test() -> list[str]:
        seen: list[str] = []
        over, may_end = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            reply = reply_to(send)
            watch(exchange_of(scope))
            await reply.whole(200, (), b"ok")
            seen.append("answered")
            await may_end.wait()
            seen.append("done")
            over.set()

        connection, _ = connect(app)
        connection.data_received(b"GET / HTTP/1.1\r\nhost: r\r\n\r\n")
        await asyncio.sleep(0)
        connection.eof_received()
        connection.connection_lost(None)
        may_end.set()
        await over.wait()
        return seen

    assert asyncio.run(test()) == ["answered", "done"]


# -- answers ---------------------------------------------------------------------------------------------------------


async def after_loss(act: Callable[[Reply], Awaitable[None]]) -> None:
    """What `act` raises where the transport is closed, though the connection has not been told yet."""
    raised: list[BaseException] = []
    over = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pipe.close()
        try:
            await act(reply_to(send))
        except ClientLeft as error:
            raised.append(error)
        over.set()

    connection, pipe = connect(app)
    connection.data_received(b"GET / HTTP/1.1\r\nhost: r\r\n\r\n")
    await over.wait()
    connection.connection_lost(None)
    assert len(raised) == 1
    assert pipe.written == b""


def test_an_answer_to_a_closed_transport_is_a_client_that_left_and_no_bug() -> None:
    asyncio.run(after_loss(lambda reply: reply.start(200, ())))
    asyncio.run(after_loss(lambda reply: reply.whole(200, (), b"x")))
    asyncio.run(after_loss(lambda reply: reply.fail(ApiError(400, "x", "x"))))


def test_a_client_that_the_server_calls_gone_has_left() -> None:
    async def send(message: Any) -> None:
        raise ConnectionResetError

    with pytest.raises(ClientLeft):
        asyncio.run(reply_to(send).write(b"x"))


def test_an_answer_that_breaks_the_servers_rules_stays_a_bug() -> None:
    async def send(message: Any) -> None:
        raise RuntimeError("the answer's body and its content-length differ")

    with pytest.raises(RuntimeError, match="differ"):
        asyncio.run(reply_to(send).write(b"x"))


def told(act: Callable[[Reply], Awaitable[None]]) -> tuple[bytes, list[BaseException]]:
    """What a reply with its own end of the connection writes, and what it raises."""
    raised: list[BaseException] = []

    async def test() -> bytes:
        over = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            reply = Reply(send, RequestRecord("id", 0.0), ErrorShape.OPENAI, exchange_of(scope))
            try:
                await act(reply)
            except (ClientLeft, RuntimeError) as error:
                raised.append(error)
            over.set()

        connection, pipe = connect(app)
        connection.data_received(b"GET / HTTP/1.1\r\nhost: r\r\n\r\n")
        await over.wait()
        connection.connection_lost(None)
        return bytes(pipe.written)

    return asyncio.run(test()), raised


def test_a_whole_answer_is_the_same_with_and_without_messages() -> None:
    async def act(reply: Reply) -> None:
        await reply.whole(200, [(b"content-type", b"text/plain"), (b"x-own", b"1")], b"ok")

    async def by_messages() -> bytes:
        over = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await act(reply_to(send))
            over.set()

        connection, pipe = connect(app)
        connection.data_received(b"GET / HTTP/1.1\r\nhost: r\r\n\r\n")
        await over.wait()
        connection.connection_lost(None)
        return bytes(pipe.written)

    direct, raised = told(act)

    assert raised == []
    assert direct.endswith(b"\r\ncontent-length: 2\r\n\r\nok")
    assert sorted(direct.split(b"\r\n")) == sorted(asyncio.run(by_messages()).split(b"\r\n"))


def writes_of(act: Callable[[Reply], Awaitable[None]]) -> list[bytes]:
    """What `act` writes, past messages, a write each."""
    seen: list[bytes] = []
    over = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await act(Reply(send, RequestRecord("id", 0.0), ErrorShape.OPENAI, exchange_of(scope)))
        over.set()

    async def test() -> None:
        connection, pipe = connect(app)
        pipe.write = seen.append  # type: ignore[method-assign]
        connection.data_received(b"GET / HTTP/1.1\r\nhost: r\r\n\r\n")
        await over.wait()
        connection.connection_lost(None)

    asyncio.run(test())
    return seen


def test_the_head_of_a_stream_and_its_first_token_are_one_write() -> None:
    async def act(reply: Reply) -> None:
        await reply.start(200, (), b"data: 1\n\n", is_stream=True)
        await reply.write(b"data: 2\n\n")
        await reply.end()

    first, *others = writes_of(act)

    assert first.startswith(b"HTTP/1.1 200 OK\r\nx-request-id: id\r\n")
    assert first.endswith(b"transfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
    assert others == [b"9\r\ndata: 2\n\n\r\n", b"0\r\n\r\n"]


def test_the_head_of_a_stream_that_has_no_token_yet_goes_out_alone_and_at_once() -> None:
    async def act(reply: Reply) -> None:
        await reply.start(200, (), is_stream=True)
        await reply.write(b"data: 1\n\n")
        await reply.end()

    head, token, _ = writes_of(act)

    assert head.endswith(b"transfer-encoding: chunked\r\n\r\n")
    assert token == b"9\r\ndata: 1\n\n\r\n"


def test_the_first_bytes_of_a_long_plain_answer_go_out_with_its_head() -> None:
    async def act(reply: Reply) -> None:
        await reply.start(200, ((b"content-length", b"4"),), b"ab")
        await reply.write(b"c")
        await reply.end(b"d")

    first, *others = writes_of(act)

    assert first.endswith(b"content-length: 4\r\n\r\nab")
    assert others == [b"c", b"d"]


def test_a_header_that_breaks_out_of_its_line_is_a_bug_also_without_messages() -> None:
    async def act(reply: Reply) -> None:
        await reply.whole(200, [(b"x-own", b"1\r\nx-evil: 1")], b"ok")

    written, raised = told(act)

    assert isinstance(raised[0], RuntimeError)
    assert b"evil" not in written


def test_a_piece_that_is_put_is_a_chunk_of_its_own_and_tells_of_room() -> None:
    rooms: list[bool] = []

    async def act(reply: Reply) -> None:
        await reply.start(200, (), is_stream=True)
        rooms.append(reply.can_put)
        rooms.append(reply.put(b"data: 1\n\n"))
        await reply.end()

    written, raised = told(act)

    assert (rooms, raised) == ([True, True], [])
    assert written.endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n0\r\n\r\n")
