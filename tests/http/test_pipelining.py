"""One request at a time on a connection: what comes during a call, and a client that leaves amid it."""

import asyncio
import contextlib
import json

import pytest
from starlette.types import Receive, Scope, Send

from tests.http.door import PLAIN_HEADERS, Held, all_read, serving
from tests.http.scripted import ScriptedEngine, says
from tests.http.setting import chat_body, model_config
from tests.http.stack import Stack, fresh, until
from tests.http.wire import Wire, exchange, request
from tests.upstream.fakes import Connection, SeenRequest

CHAT = request("/v1/chat/completions", json.dumps(chat_body(max_tokens=2)).encode())


@pytest.mark.parametrize("together", [True, False], ids=["one piece", "two pieces"])
@pytest.mark.parametrize("second", [request("/two"), b"\0garbage"], ids=["request", "garbage"])
async def test_what_comes_during_a_call_is_not_served_and_the_answer_closes(second: bytes, *, together: bool) -> None:
    app = Held()

    async with serving(app) as port, Wire(port) as wire:
        await wire.send(request("/one", b"abc") + (second if together else b""))
        await app.has_come.wait()
        if not together:
            await wire.send(second)
            await all_read(port)
        app.may_answer.set()
        answers = await wire.rest()

    assert answers.startswith(b"HTTP/1.1 200")
    assert answers.endswith(b"\r\n\r\nok")
    assert b"\r\nconnection: close\r\n" in answers
    assert app.paths == ["/one"]


@pytest.mark.parametrize("together", [True, False], ids=["one piece", "two pieces"])
async def test_a_client_that_pipelined_and_leaves_is_seen_to_leave(*, together: bool) -> None:
    app = Held()

    async with serving(app) as port:
        async with Wire(port) as wire:
            await wire.send(request("/one") + (request("/two") if together else b""))
            await app.has_come.wait()
            if not together:
                await wire.send(request("/two", b"x" * 500_000))
        await app.left.wait()

    assert app.paths == ["/one"]


async def test_what_a_pipelining_client_may_send_for_nothing_is_bounded() -> None:
    app = Held()

    async with serving(app, discard_max_bytes=100_000) as port, Wire(port) as wire:
        await wire.send(request("/one"))
        await app.has_come.wait()
        with contextlib.suppress(ConnectionError):
            await wire.send(request("/two", b"x" * 1_000_000))
        await app.left.wait()

    assert app.paths == ["/one"]


async def test_a_client_that_had_its_whole_answer_is_not_pipelining_though_the_call_goes_on() -> None:
    """A streamed answer of known length is over for the client before it is for us."""
    all_sent, may_end = asyncio.Event(), asyncio.Event()
    paths: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": PLAIN_HEADERS})
        await send({"type": "http.response.body", "body": b"ok", "more_body": True})
        all_sent.set()
        await may_end.wait()
        await send({"type": "http.response.body", "body": b""})

    async with serving(app) as port, Wire(port) as wire:
        await wire.send(request("/one"))
        await wire.answer()
        await all_sent.wait()
        await wire.send(request("/two"))
        await all_read(port)
        may_end.set()
        status, headers, _ = await wire.answer()

    assert status == 200
    assert "connection" not in headers
    assert paths == ["/one", "/two"]


# -- in the router


async def silent_engine(_: SeenRequest, connection: Connection) -> None:
    await connection.closed()


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_two_pipelined_chats_whose_client_leaves_give_everything_back(
    leave: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(silent_engine)
    async with fresh(c=engine, models=[model_config(borrow=False)]) as stack:
        async with Wire(stack.port) as wire:
            await wire.send(CHAT + CHAT)
            await until(lambda: len(engine.calls) == 1)
            if leave == "reset":
                wire.reset()
        await until(lambda: stack.runtime.state.in_flight == 0)
        engine.answering = says()
        page = await stack.metrics()

        assert len(engine.calls) == 1
        assert page.value("router_requests_total", outcome="client_left_prefill") == 1
        assert page.value("router_requests_total", outcome="internal_error") == 0
        assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_the_first_of_two_pipelined_chats_is_answered_and_the_second_left_to_be_sent_again(stack: Stack) -> None:
    sent_before = len(stack.entries("c"))

    answers = await exchange(stack.port, CHAT + CHAT)

    assert answers.startswith(b"HTTP/1.1 200")
    assert b"\r\nconnection: close\r\n" in answers
    assert answers.count(b"HTTP/1.1 ") == 1
    assert len(stack.entries("c")) == sent_before + 1
