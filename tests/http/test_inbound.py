"""A client's connection before and between its requests: silent, slow, endless, broken, or too many."""

import asyncio
import contextlib
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from router.http import inbound
from router.http.inbound import InboundProtocol
from tests.http.door import PLAIN_HEADERS, App, Held, all_read, code_of, error_of, serving
from tests.http.stack import Stack, fresh, until
from tests.http.wire import Wire, exchange, request
from tests.upstream.fakes import piece

#: Short enough to be waited for, long enough for a request on a busy machine.
SHORT_S = 0.2


async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before it reads."""
    await send({"type": "http.response.start", "status": 413, "headers": PLAIN_HEADERS})
    await send({"type": "http.response.body", "body": b"no"})


# -- silence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"\r\n\r\n"], ids=["nothing", "line ends"])
async def test_a_connection_that_asks_for_nothing_is_closed_without_a_word(said: bytes) -> None:
    async with serving(App(), head_s=SHORT_S) as port:
        answer = await exchange(port, said)

    assert answer == b""


@pytest.mark.parametrize("begun", [b"P", request("/v1/models")[:40], b"POST /" + b"x" * 999], ids=["P", "half", "URL"])
async def test_half_a_head_is_told_that_it_is_late(begun: bytes) -> None:
    app = App()

    async with serving(app, head_s=SHORT_S) as port:
        answer = await exchange(port, begun)

    assert code_of(answer) == (408, "request_headers_timeout")
    assert app.paths == []


async def test_a_head_that_comes_byte_by_byte_does_not_move_its_deadline() -> None:
    async with serving(App(), head_s=SHORT_S) as port, Wire(port) as wire:
        reading = asyncio.create_task(wire.rest())
        await wire.send(b"GET / HTTP/1.1\r\nx-a: ")
        while not reading.done():
            with contextlib.suppress(ConnectionError):
                await wire.send(b"a")
            await asyncio.sleep(0.01)

        assert code_of(reading.result()) == (408, "request_headers_timeout")


async def test_a_later_request_of_a_connection_has_the_same_deadline() -> None:
    async with serving(App(), head_s=SHORT_S) as port, Wire(port) as wire:
        await wire.send(request("/one"))
        first, _, _ = await wire.answer()
        await wire.send(request("/two")[:20])
        rest = await wire.rest()

    assert first == 200
    assert code_of(rest) == (408, "request_headers_timeout")


async def test_the_deadline_is_for_the_head_alone_and_not_for_what_follows() -> None:
    app = Held()
    async with serving(app, head_s=SHORT_S) as port, Wire(port) as wire, Wire(port) as silent:
        await wire.send(request("/", b"abc")[:-1])
        # The other connection's deadline came after this one's would have.
        await silent.rest()
        await wire.send(b"c")
        await app.has_come.wait()
        app.may_answer.set()
        status, _, _ = await wire.answer()

    assert status == 200


async def test_the_rest_of_a_body_that_is_answered_already_has_to_come_soon() -> None:
    async with serving(refusing, rest_s=SHORT_S) as port, Wire(port) as wire:
        await wire.send(request("/", b"abc")[:-1])
        status, _, _ = await wire.answer()
        rest = await wire.rest()

    assert (status, rest) == (413, b"")


async def test_a_connection_whose_late_body_came_is_kept_for_the_next_request_and_no_longer_than_any() -> None:
    config: dict[str, Any] = {"head_s": SHORT_S, "rest_s": 60.0}
    async with serving(refusing, **config) as port, Wire(port) as wire:
        await wire.send(request("/", b"abc")[:-1])
        await wire.answer()
        await wire.send(b"c")
        await wire.send(request("/again"))
        status, _, _ = await wire.answer()
        await wire.send(b"G")
        rest = await wire.rest()

    assert status == 413
    assert code_of(rest) == (408, "request_headers_timeout")


# -- size ------------------------------------------------------------------------------------------------------------


def with_head_of(size: int, *, where: str) -> bytes:
    """A request whose line and headers together are nearly `size` bytes."""
    filling = "x" * size
    if where == "url":
        return request("/?" + filling)
    if where == "value":
        return request("/", headers=["x-a: " + filling])
    if where == "name":
        return request("/", headers=[filling + ": a"])
    return request("/", headers=["x-a: " + "x" * 90] * (size // 100))


@pytest.mark.parametrize("where", ["url", "value", "name", "many"])
async def test_a_head_within_the_bound_is_served_and_one_above_it_a_431(where: str) -> None:
    app = App()

    async with serving(app) as port:
        async with Wire(port) as wire:
            await wire.send(with_head_of(60_000, where=where))
            status, _, _ = await wire.answer()
        refused = await exchange(port, with_head_of(70_000, where=where))
        far_above = await exchange(port, with_head_of(2_000_000, where=where))

    assert status == 200
    assert code_of(refused) == code_of(far_above) == (431, "request_headers_too_large")
    assert len(app.paths) == 1


async def test_a_head_without_end_is_refused_at_the_bound_and_not_at_its_end() -> None:
    async with serving(App()) as port, Wire(port) as wire:
        await wire.send(b"GET / HTTP/1.1\r\nx-a: ")
        for _ in range(70):
            await wire.send(b"a" * 1_000)
        answer = await wire.rest()

    assert code_of(answer) == (431, "request_headers_too_large")


async def test_who_goes_on_sending_after_a_refusal_is_cut_off() -> None:
    async with serving(App(), linger_s=60.0, discard_max_bytes=100_000) as port, Wire(port) as wire:
        with contextlib.suppress(ConnectionError):
            for _ in range(1_000):
                await wire.send(b"a" * 100_000)
        rest = await wire.rest()

    assert rest.count(b"HTTP/1.1 ") <= 1


async def test_who_stays_after_a_refusal_is_hung_up_on() -> None:
    async with serving(App(), linger_s=SHORT_S) as port, Wire(port) as wire:
        await wire.send(b"?")
        answer = await wire.rest()
        # The router has only shut down its side; nothing but its own timer ends the connection now.
        with contextlib.suppress(ConnectionError):
            while True:
                await wire.send(b"x")
                await asyncio.sleep(0.01)

    assert code_of(answer) == (400, "malformed_request")


@pytest.mark.parametrize("endless", [b"x-t: " + b"a" * 95 + b"\r\n", b"a" * 100], ids=["fields", "one field"])
async def test_trailers_are_no_headers_and_have_the_same_bound(endless: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n"
    app = App()

    async with serving(app) as port:
        async with Wire(port) as wire:
            await wire.send(head + piece(b"abc") + b"0\r\nx-t: 1\r\nauthorization: Bearer x\r\n\r\n")
            status, _, _ = await wire.answer()
        served = (status, app.body, [name for name, _ in app.headers])
        async with Wire(port) as wire:
            await wire.send(head)
            await until(lambda: len(app.paths) == 2)
            await wire.send(piece(b"abc") + b"0\r\nx-u: ")
            await until(lambda: app.body == b"abc")
            for _ in range(700):
                await wire.send(endless)
            answer = await wire.rest()

    assert served == (200, b"abc", [b"host", b"transfer-encoding"])
    assert code_of(answer) == (431, "request_headers_too_large")


# -- in the router ---------------------------------------------------------------------------------------------------

BROKEN = {
    "no HTTP": b"\x16\x03\x01\x02\x00",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no target": b"GET\r\n\r\n",
    "bad target": b"CONNECT x HTTP/1.1\r\n\r\n",
    "target of another alphabet": b"GET /\xc3\xa9 HTTP/1.1\r\n\r\n",
    "bad length": b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
async def test_what_is_no_request_is_told_so_in_the_standard_shape(
    stack: Stack, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await exchange(stack.port, broken)

    assert code_of(answer) == (400, "malformed_request")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_bug_while_a_request_is_taken_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inbound, "_split", lambda target: 1 / 0)

    async with serving(App()) as port:
        answer = await exchange(port, request("/"))

    assert code_of(answer) == (400, "malformed_request")
    assert "a request could not be taken" in caplog.messages


async def test_a_body_whose_framing_breaks_ends_as_the_clients_fault(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    before = await stack.metrics()
    head = b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"

    async with Wire(stack.port) as wire:
        await wire.send(head + piece(b'{"model":'))
        await until(lambda: stack.runtime.state.in_flight == 1)
        await wire.send(b"-1\r\n")
        answer = await wire.rest()
    await until(lambda: stack.runtime.state.in_flight == 0)

    after = await stack.metrics()
    left = "client_left_upload"
    assert code_of(answer) == (400, "malformed_request")
    assert after.value("router_requests_total", outcome=left) - before.value("router_requests_total", outcome=left) == 1
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_of_many_connections_at_once_those_before_the_bound_are_served() -> None:
    asked = request("/", method="GET", headers=["connection: close"])
    async with serving(App(), connections=2) as port, Wire(port) as first, Wire(port) as second, Wire(port) as extra:
        await all_read(port)

        await extra.send(asked)
        refused = await extra.rest()
        await first.send(asked)
        await second.send(asked)
        served = [await wire.rest() for wire in (first, second)]

        assert error_of(refused)[0] == 503
        assert [answer[:12] for answer in served] == [b"HTTP/1.1 200"] * 2


async def test_silent_connections_hold_the_router_only_as_long_as_their_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections_max = 8
    async with fresh(server={"connections_max": connections_max}) as stack, contextlib.AsyncExitStack() as silent:
        wires = [await silent.enter_async_context(Wire(stack.port)) for _ in range(connections_max + 64)]
        # Accepted in order: once the last one is answered, all the others are counted.
        refused = await exchange(stack.port, request("/healthz", method="GET"))
        monkeypatch.setattr(InboundProtocol, "head_s", SHORT_S)
        for wire in wires:
            wire.reset()
        wires = [await silent.enter_async_context(Wire(stack.port)) for _ in range(connections_max + 64)]
        for wire in wires:
            await wire.rest()
        served = await stack.get("/healthz")

        status, headers, error = error_of(refused)
        assert (status, error["code"], headers["retry-after"]) == (503, "too_many_connections", "5")
        assert served.status_code == 200
