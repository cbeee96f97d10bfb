"""The relay: what an outside provider is sent, and when it is left alone."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from router.config.model import RelayConfig, Secret, TimeoutConfig
from router.policy.breaker import BreakerState
from router.policy.demand import RequestClass
from router.upstream.api import ConnectFailed, UpstreamLost, UpstreamRequest, UpstreamResponse
from router.upstream.relay import HOP_HEADER, Relay, RelayUnavailable, hop_refusal, may_relay

from .fakes import STREAM_HEAD, Connection, RawServer, Script, SeenRequest, answer, piece, rest_of, run, serve

POST = UpstreamRequest("POST", "/v1/chat/completions", ((b"content-type", b"application/json"),), b'{"stream":true}')


class JumpClock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.s = 100.0

    def now_s(self) -> float:
        return self.s

    def unix_s(self) -> float:
        return self.s


@asynccontextmanager
async def relay(script: Script, clock: JumpClock | None = None, path: str = "/v1") -> AsyncIterator[Relay]:
    async with RawServer(script) as server:
        config = RelayConfig(
            name="r",
            url=server.url + path,
            api_key=Secret("own-key"),
            models={"chat-8b": "vendor/big-1"},
            classes=frozenset({RequestClass.CHAT}),
            timeouts=TimeoutConfig(5, 5, 5),
            breaker_failures=2,
            breaker_open_s=30,
            proxy=None,
        )
        it = Relay(config, clock or JumpClock(), router_id="me")
        try:
            yield it
        finally:
            await it.aclose()


async def open_(it: Relay, request: UpstreamRequest = POST) -> UpstreamResponse:
    return await it.open(request, connect_s=5, first_byte_s=5, idle_s=5)


def state(it: Relay) -> BreakerState:
    return it._breaker.state(it._clock.now_s())


async def call(it: Relay, request: UpstreamRequest = POST) -> tuple[int, bytes]:
    response = await open_(it, request)
    try:
        return response.status, await rest_of(response)
    finally:
        response.close()


def test_a_relay_gets_its_own_key_its_own_path_and_only_safe_headers() -> None:
    seen: list[SeenRequest] = []

    def handler(request: SeenRequest) -> bytes:
        seen.append(request)
        return answer(b"{}", headers="x-ratelimit-remaining: 3\r\nset-cookie: a=b\r\ncontent-type: text/x\r\n")

    headers = (
        (b"content-type", b"application/json"),
        (b"authorization", b"Bearer of-the-client"),
        (b"user-agent", b"client/1"),
        (b"x-forwarded-for", b"10.0.0.1"),
        (b"x-vllm-priority", b"-1"),
        (HOP_HEADER.encode(), b"other"),
    )

    async def body() -> None:
        async with relay(serve(handler)) as it:
            response = await open_(it, replace(POST, headers=headers))
            response.close()

            assert seen[0].line == "POST /v1/chat/completions HTTP/1.1"
            assert {name for name, _ in seen[0].headers} == {
                "accept-encoding",
                "authorization",
                "content-length",
                "content-type",
                "host",
                HOP_HEADER,
            }
            assert seen[0].all("authorization") == ["Bearer own-key"]
            assert seen[0].all(HOP_HEADER) == ["other, me"]
            assert sorted(response.headers) == [(b"content-length", b"2"), (b"content-type", b"text/x")]

    run(body())


def test_a_refusal_whose_words_do_not_end_is_told_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.upstream.relay._REFUSAL_S", 0.02)

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 400 X\r\ncontent-length: 999\r\n\r\nno")
        await connection.closed()

    async def body() -> None:
        async with relay(script) as it:
            assert await call(it, replace(POST, body=b'{"stream_options":{}}')) == (400, b"no")

    run(body())


def test_a_model_without_a_name_there_is_not_relayed() -> None:
    async def body() -> None:
        async with relay(serve(lambda _: answer(b""))) as it:
            assert it.model_for("chat-8b") == "vendor/big-1"
            assert it.model_for("chat-70b") is None

    run(body())


def test_a_request_that_has_passed_this_router_or_two_others_is_a_loop() -> None:
    assert hop_refusal(None, "me") is None
    assert hop_refusal("other", "me") is None
    assert hop_refusal("me", "me") is not None
    assert hop_refusal("other, me", "me") is not None
    assert hop_refusal("a,b", "me") is not None
    assert may_relay(None)
    assert may_relay(" , ")
    assert not may_relay("other")


def test_failures_in_a_row_open_the_breaker_and_a_good_trial_closes_it() -> None:
    said = [answer(b"{}", status=500), answer(b"{}", status=429), answer(b"{}"), answer(b"{}")]

    async def body() -> None:
        clock = JumpClock()
        async with relay(serve(lambda _: said.pop(0)), clock) as it:
            assert [(await call(it))[0] for _ in range(2)] == [500, 429]

            with pytest.raises(RelayUnavailable) as caught:
                await open_(it)
            assert isinstance(caught.value, ConnectFailed)
            assert (state(it), it.can_try, it.retry_after_s) == (BreakerState.OPEN, False, 30)
            clock.s += 30
            assert (await call(it))[0] == 200
            assert state(it) is BreakerState.CLOSED

    run(body())


def test_a_clients_mistake_neither_opens_the_breaker_nor_vouches_for_the_relay() -> None:
    said = [500, 400, 404, 500]

    async def body() -> None:
        async with relay(serve(lambda _: answer(b"{}", status=said.pop(0)))) as it:
            for _ in range(4):
                await call(it)

            assert state(it) is BreakerState.OPEN

    run(body())


def test_a_lost_answer_counts_against_the_relay_and_a_client_that_leaves_does_not() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + piece(b"a"))
        if connection.number <= 2:
            await connection.closed()
        connection.reset()

    async def body() -> None:
        async with relay(script) as it:
            for _ in range(2):
                response = await open_(it)
                response.close()
            assert state(it) == "closed"
            for _ in range(2):
                with pytest.raises(UpstreamLost):
                    await call(it)

            assert state(it) == "open"

    run(body())


def test_a_trial_frees_the_breaker_at_its_first_byte_or_when_its_caller_is_cancelled() -> None:
    async def body() -> None:
        clock = JumpClock()
        asked = asyncio.Event()

        async def script(connection: Connection) -> None:
            await connection.request()
            if connection.number <= 2:
                connection.reset()
            elif connection.number == 3:
                asked.set()
                await connection.closed()
            else:
                await connection.send(STREAM_HEAD + piece(b"a"))
                await connection.closed()

        async with relay(script, clock) as it:
            for _ in range(2):
                with pytest.raises(UpstreamLost):
                    await open_(it)
            clock.s += 30
            trial = asyncio.create_task(open_(it))
            await asked.wait()
            assert not it.can_try
            trial.cancel()
            await asyncio.gather(trial, return_exceptions=True)
            assert state(it) == "half_open"
            response = await open_(it)
            assert await response.read() == b"a"

            assert state(it) == "closed"
            response.close()

    run(body())


def test_stream_options_that_a_relay_refuses_are_left_out_from_then_on() -> None:
    bodies: list[dict[str, object]] = []

    def handler(request: SeenRequest) -> bytes:
        bodies.append(json.loads(request.body))
        if "stream_options" in bodies[-1]:
            return answer(b'{"error":{"message":"Unknown field stream_options"}}', status=400)
        return answer(b"{}")

    options = b'{"stream":true,"n":1.0,"stream_options":{"include_usage":true},"x":1e2}'

    async def body() -> None:
        async with relay(serve(handler)) as it:
            first = await call(it, replace(POST, body=options))
            second = await call(it, replace(POST, body=options))

            assert (first, second) == ((200, b"{}"), (200, b"{}"))
            assert ["stream_options" in one for one in bodies] == [True, False, False]
            assert state(it) is BreakerState.CLOSED

    run(body())


def test_another_400_whose_body_breaks_off_is_still_a_400() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 400 X\r\ncontent-length: 99\r\n\r\nno such")
        connection.writer.close()

    async def body() -> None:
        async with relay(script) as it:
            assert await call(it, replace(POST, body=b'{"stream_options":{}}')) == (400, b"no such")

    run(body())


def test_another_400_comes_back_whole_and_is_not_sent_again() -> None:
    refusal = b'{"error":{"message":"max_tokens is too large"}}'
    asked: list[SeenRequest] = []

    def handler(request: SeenRequest) -> bytes:
        asked.append(request)
        return answer(refusal, status=400)

    async def body() -> None:
        async with relay(serve(handler)) as it:
            assert await call(it, replace(POST, body=b'{"stream_options":{}}')) == (400, refusal)
            assert len(asked) == 1

    run(body())
