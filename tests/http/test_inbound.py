"""A client's connection before and between its requests: silent, slow, endless, broken, or too many."""

import asyncio
import contextlib
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from router.alarm import TICK_S
from router.http import inbound
from router.http.inbound import InboundProtocol
from tests.http.door import PLAIN_HEADERS, App, Held, code_of, error_of, serving
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
    "HTTP/0.9": b"GET /healthz\r\n\r\n",
    "HTTP/2 by name": b"GET /healthz HTTP/2.0\r\nhost: r\r\n\r\n",
    "no host": b"GET /healthz HTTP/1.1\r\nx-host: r\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\nhost: r\r\nHost: r\r\n\r\n",
    "two hosts of an older client": b"GET /healthz HTTP/1.0\r\nhost: r\r\nhost: r\r\n\r\n",
    "bad target": b"CONNECT x HTTP/1.1\r\nhost: x\r\n\r\n",
    "a tunnel": b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    "target of another alphabet": b"GET /\xc3\xa9 HTTP/1.1\r\nhost: r\r\n\r\n",
    "bad length": b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-length: x\r\n\r\n",
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
    monkeypatch.setattr(inbound, "split_target", lambda target: 1 / 0)

    async with serving(App()) as port:
        answer = await exchange(port, request("/"))

    assert code_of(answer) == (400, "malformed_request")
    assert "a request could not be taken" in caplog.messages


async def test_a_body_whose_framing_breaks_ends_as_the_clients_fault(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    before = await stack.metrics()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n"

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


# -- too many --------------------------------------------------------------------------------------------------------

BOUND = 8


async def test_silent_connections_cost_established_clients_and_probes_nothing() -> None:
    async with fresh(server={"connections_max": BOUND}) as stack, contextlib.AsyncExitStack() as wires:
        kept = await wires.enter_async_context(Wire(stack.port))
        await kept.send(request("/healthz", method="GET"))
        await kept.answer()
        for _ in range(2 * (BOUND + 64)):
            await wires.enter_async_context(Wire(stack.port))
        probe = await wires.enter_async_context(Wire(stack.port))
        await probe.send(request("/healthz", method="GET"))
        probed, _, _ = await probe.answer()
        chat = await stack.chat()
        await kept.send(request("/healthz", method="GET"))
        again, _, _ = await kept.answer()

    assert (probed, chat.status_code, again) == (200, 200, 200)


async def ask(wire: Wire, target: str = "/") -> int:
    await wire.send(request(target))
    status, _, _ = await wire.answer()
    return status


async def test_for_a_new_connection_the_one_that_never_asked_ends_then_the_longest_idle_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.http.inbound.YOUNG_S", 0.0)
    async with serving(App(), connections=3) as port, contextlib.AsyncExitStack() as stack:
        first, second, silent = [await stack.enter_async_context(Wire(port)) for _ in range(3)]
        await ask(second)
        now_s = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > now_s + 2 * TICK_S)
        await ask(first)
        asked = [await ask(await stack.enter_async_context(Wire(port))) for _ in range(2)]
        ended = [await silent.rest(), await second.rest()]
        asked.append(await ask(first))

    assert ended == [b"", b""]
    assert asked == [200, 200, 200]


async def test_a_connection_whose_request_may_be_on_its_way_stays_longer_than_one_long_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.http.inbound.YOUNG_S", InboundProtocol.head_s)
    monkeypatch.setattr("router.http.inbound.RECENT_S", 0.0)
    async with serving(App(), connections=2) as port, Wire(port) as idle:
        await ask(idle)
        async with Wire(port) as one, Wire(port) as another:
            ended = await idle.rest()
            asked = [await ask(one), await ask(another)]

    assert ended == b""
    assert asked == [200, 200]


@pytest.mark.parametrize("begun", [b"GET / HT", request("/", b"abc")[:-1]], ids=["head", "rest of a body"])
async def test_half_a_request_makes_way_where_nothing_else_can(begun: bytes) -> None:
    async with serving(refusing, connections=1, head_s=60.0, rest_s=60.0) as port, Wire(port) as wire:
        await wire.send(begun)
        await all_read_beside(wire, begun)
        async with Wire(port) as other:
            status = await ask(other)
            rest = await wire.rest()

    assert status == 413
    assert rest == b""


async def all_read_beside(wire: Wire, begun: bytes) -> None:
    """What `begun` leads to is here, without another connection."""
    if b"abc"[:-1] in begun:
        await wire.answer()
    else:
        for _ in range(100):
            await asyncio.sleep(0)


async def test_calls_under_way_never_end_for_a_new_connection_which_is_refused_but_on_open_paths() -> None:
    app = Held()
    async with serving(app, connections=2) as port, Wire(port) as one, Wire(port) as two:
        for wire in (one, two):
            await wire.send(request("/held"))
        await until(lambda: len(app.paths) == 2)
        refused = await exchange(port, request("/v1/models"))
        async with Wire(port) as probe:
            await probe.send(request("/healthz", method="GET"))
            await until(lambda: len(app.paths) == 3)
            app.may_answer.set()
            answers = [(await wire.answer())[0] for wire in (one, two, probe)]

    status, headers, error = error_of(refused)
    assert (status, error["code"], headers["retry-after"]) == (503, "too_many_connections", "5")
    assert answers == [200, 200, 200]


async def test_a_connection_beyond_the_bound_is_like_any_other_once_one_has_ended() -> None:
    app = Held()
    async with serving(app, connections=1) as port, Wire(port) as one:
        await one.send(request("/held"))
        await app.has_come.wait()
        async with Wire(port) as beyond:
            await beyond.send(request("/healthz", method="GET"))
            await until(lambda: len(app.paths) == 2)
            one.reset()
            await app.left.wait()
            await beyond.answer()
            status = await ask(beyond)

    assert status == 200
