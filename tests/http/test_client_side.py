"""The client's side of a call alone: how long a body may take, and how an answer ends whose reader is gone."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Send

from router.errors import ApiError, ErrorShape
from router.http.client import Body, BufferBudget, ClientLeft, Reply
from router.request import RequestRecord
from tests.flow.jumping import JumpingLoop, run_on


def reply_to(send: Send) -> Reply:
    return Reply(send, RequestRecord("id", 0.0), ErrorShape.OPENAI)


class Upload:
    """A body that comes in pieces of `size_bytes`, one each `pause_s`; its last is the `pieces`th."""

    def __init__(self, *, size_bytes: int, pause_s: float, pieces: int) -> None:
        self._size_bytes = size_bytes
        self._pause_s = pause_s
        self._left = pieces

    async def receive(self) -> Message:
        await asyncio.sleep(self._pause_s)
        self._left -= 1
        return {"type": "http.request", "body": b"x" * self._size_bytes, "more_body": self._left > 0}


async def length_of(upload: Upload, budget: BufferBudget) -> int:
    with Body({"type": "http", "headers": []}, upload.receive, max_bytes=10**8, budget=budget) as body:
        return len(await body.read())


def test_a_body_that_never_pauses_long_and_never_ends_is_given_up_all_the_same() -> None:
    """One byte a minute, less a second: every pause is allowed, and the whole would take for ever."""
    loop, budget = JumpingLoop(), BufferBudget(10**8)
    begun_at_s = loop.time_s

    with pytest.raises(ApiError) as refused:
        run_on(loop, length_of(Upload(size_bytes=1, pause_s=59.0, pieces=10**6), budget))

    assert (refused.value.status, refused.value.code) == (408, "upload_timeout")
    assert refused.value.headers == {"connection": "close"}
    assert loop.time_s - begun_at_s == pytest.approx(60.0, abs=0.1)
    assert budget.used_bytes == 0


def test_a_body_that_comes_faster_than_the_least_rate_may_take_as_long_as_it_needs() -> None:
    upload = Upload(size_bytes=101_000, pause_s=10.0, pieces=100)

    length = run_on(JumpingLoop(), length_of(upload, BufferBudget(10**8)))

    assert length == 100 * 101_000


def test_a_body_that_comes_slower_than_the_least_rate_gets_what_its_bytes_earned() -> None:
    """5,000 bytes a second for 60 s of grace: it lasts 120 s, half of them earned."""
    loop = JumpingLoop()
    begun_at_s = loop.time_s

    with pytest.raises(ApiError, match=r"5\d\d,000 bytes of the body came in 1\d\d s"):
        run_on(loop, length_of(Upload(size_bytes=5_000, pause_s=1.0, pieces=10**6), BufferBudget(10**8)))

    assert loop.time_s - begun_at_s == pytest.approx(120.0, abs=2.0)


async def test_an_answer_to_a_closed_transport_is_a_client_that_left_and_no_bug() -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.close()
    await writer.wait_closed()
    # uvloop closes its handle in a later step than the one that says so.
    for _ in range(3):
        await asyncio.sleep(0)

    async def send(message: Any) -> None:
        writer.transport.write(b"x")

    with pytest.raises(ClientLeft):
        await reply_to(send).write(b"x")


async def test_a_client_that_the_server_calls_gone_has_left() -> None:
    async def send(message: Any) -> None:
        raise ConnectionResetError

    with pytest.raises(ClientLeft):
        await reply_to(send).write(b"x")


async def test_an_answer_that_breaks_the_servers_rules_stays_a_bug() -> None:
    async def send(message: Any) -> None:
        raise RuntimeError("Response content longer than Content-Length")

    with pytest.raises(RuntimeError, match="longer"):
        await reply_to(send).write(b"x")
