"""The open-loop client: every arrival ends in exactly one result, whatever the server does and however the run ends."""

import asyncio
import json
import math
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from router.policy.demand import RequestClass
from router.sim.load import Load, LoadOptions
from router.sim.workload import TINY_SHAPES, LoadSpec, PlannedRequest, parse_mix, plan

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
_END = b"0\r\n\r\n"


def _event(body: object) -> bytes:
    data = b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


_ROLE = _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
_CONTENT = _event({"choices": [{"delta": {"content": "two tokens"}}]})
_USAGE = _event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 4}})
_DONE = _event(b"[DONE]")
_GOOD = _HEAD + b"\r\n" + _ROLE + _CONTENT + _CONTENT + _USAGE + _DONE + _END


@dataclass
class _Server:
    """What a test knows of its server."""

    url: str
    bodies: list[bytes] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)


_Answer = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def _always(data: bytes, *, close: bool = False) -> _Answer:
    async def answer(_index: int, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if close:
            writer.close()

    return answer


@asynccontextmanager
async def _serving(answer: _Answer) -> AsyncIterator[_Server]:
    """A server that gives each request, numbered in order of arrival, to `answer`."""
    known = _Server("")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                known.heads.append(head)
                known.bodies.append(await reader.readexactly(size))
                await answer(len(known.bodies) - 1, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    known.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield known
    finally:
        server.close()


def _plan(count: int, seed: int = 1) -> list[PlannedRequest]:
    mix = parse_mix("chat:1")
    return list(plan(LoadSpec(mix=mix, rate_per_s=math.inf, seed=seed, requests_max=count, shapes=TINY_SHAPES)))


def _run(answer: _Answer, count: int = 1, **changes: object) -> tuple[Load, _Server]:
    async def main() -> tuple[Load, _Server]:
        async with _serving(answer) as server:
            options = replace(LoadOptions(base_url=server.url, model="m"), **changes)  # type: ignore[arg-type]  # mixed
            load = Load(options)
            await load.run(_plan(count))
            return load, server

    return asyncio.run(main())


def test_a_good_answer_is_completed_with_the_tokens_of_its_usage() -> None:
    load, server = _run(_always(_GOOD))

    [result] = load.results
    body = json.loads(server.bodies[0])

    assert result.ending == "completed"
    assert (result.prompt_tokens, result.completion_tokens, result.content_chunks) == (11, 4, 2)
    assert result.sent_at_s is not None
    assert result.first_content_at_s is not None
    assert 0 <= result.sent_at_s <= result.first_content_at_s <= result.ended_at_s <= load.duration_s
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}


def test_the_same_seed_sends_the_same_bodies() -> None:
    _, first = _run(_always(_GOOD), count=12)
    _, second = _run(_always(_GOOD), count=12)

    assert sorted(first.bodies) == sorted(second.bodies)
    assert len(set(first.bodies)) == 12


def test_the_router_headers_are_kept_and_nonsense_in_them_is_not() -> None:
    named = (
        b"x-request-id: r1\r\nx-router-pool: batch\r\nx-router-engine: long-1\r\nx-router-reason: borrowed\r\n"
        b"x-router-queue-wait-ms: 12.5\r\nx-router-prompt-tokens: 77\r\n"
    )
    nonsense = b"x-router-relay: " + b"r" * 500 + b"\r\nx-router-queue-wait-ms: soon\r\nx-router-prompt-tokens: nan\r\n"
    rest = b"\r\n" + _CONTENT + _DONE + _END

    first, _ = _run(_always(_HEAD + named + rest))
    second, _ = _run(_always(_HEAD + nonsense + rest))
    router, odd = first.results[0].router, second.results[0].router

    assert (router.request_id, router.pool, router.engine, router.reason) == ("r1", "batch", "long-1", "borrowed")
    assert (router.queue_wait_ms, router.prompt_tokens) == (12.5, 77)
    assert odd.relay == "r" * 64
    assert (odd.queue_wait_ms, odd.prompt_tokens) == (None, None)


@pytest.mark.parametrize(
    ("data", "ending", "reason"),
    [
        (
            b"HTTP/1.1 429 X\r\ncontent-length: 46\r\n\r\n" + b'{"error":{"code":"chat_full","message":"wait"}}'[:46],
            "http_429",
            "",
        ),
        (
            b"HTTP/1.1 503 X\r\ncontent-length: 47\r\n\r\n" + b'{"error":{"code":"chat_full","message":"wait"}}',
            "http_503",
            "chat_full: wait",
        ),
        (b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n", "http_500", ""),
        (
            b'HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: 17\r\n\r\n{"error": "busy"}',
            "error_in_stream",
            "busy",
        ),
        (
            b"HTTP/1.1 200 X\r\ncontent-type: text/html\r\ncontent-length: 4\r\n\r\n<p/>",
            "error_in_stream",
            "not an event stream",
        ),
        (
            _HEAD + b"\r\n" + _event({"error": {"message": "m", "code": 500}}) + _DONE + _END,
            "error_in_stream",
            "500: m",
        ),
        (_HEAD + b"\r\n" + _ROLE + _DONE + _END, "empty_stream", "ended without content"),
        (_HEAD + b"\r\n" + _CONTENT + _END, "cut", "ended before [DONE]"),
    ],
)
def test_every_failure_has_its_kind_and_reason(data: bytes, ending: str, reason: str) -> None:
    load, _ = _run(_always(data))

    [result] = load.results

    assert (result.ending, result.reason) == (ending, reason)
    assert result.is_failed


@pytest.mark.parametrize("data", [b"", _HEAD + b"\r\n" + _ROLE + _CONTENT, _HEAD + b"\r\n" + _CONTENT[:9]])
def test_a_connection_that_breaks_is_a_cut_before_and_amid_the_answer(data: bytes) -> None:
    load, _ = _run(_always(data, close=True))

    [result] = load.results

    assert result.ending == "cut"
    assert result.reason.startswith(("RemoteProtocolError", "ReadError"))


def test_a_server_that_is_not_there_is_connect_failed() -> None:
    async def main() -> Load:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            load = Load(LoadOptions(base_url=f"http://127.0.0.1:{taken.getsockname()[1]}/v1", model="m"))
            await load.run(_plan(3))
            return load

    load = asyncio.run(main())

    assert Counter(result.ending for result in load.results) == {"connect_failed": 3}


async def _hold(_index: int, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Say nothing until the client has gone."""
    await reader.read()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"request_timeout_s": 0.01}, "no end within 0.01 s"), ({"drain_s": 0.01}, "still running 0.01 s after")],
)
def test_an_answer_that_never_comes_is_a_timeout(changes: dict[str, float], reason: str) -> None:
    load, _ = _run(_hold, count=3, **changes)

    assert [result.ending for result in load.results] == ["timeout"] * 3
    assert all(result.reason.startswith(reason) for result in load.results)


def test_a_request_past_the_bound_in_flight_is_not_sent_and_says_so() -> None:
    async def main() -> tuple[Load, int]:
        load: Load

        async def answer(_index: int, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while len(load.results) < 3:
                await asyncio.sleep(0)
            writer.write(_GOOD)

        async with _serving(answer) as server:
            load = Load(LoadOptions(base_url=server.url, model="m", in_flight_max=2))
            await load.run(_plan(5))
            return load, len(server.bodies)

    load, reached = asyncio.run(main())
    limited = [result for result in load.results if result.ending == "client_limit"]

    assert reached == 2
    assert len(limited) == 3
    assert all(result.sent_at_s is None for result in limited)
    assert load.in_flight_peak == 2


def test_a_run_that_is_stopped_still_has_one_result_for_each_arrival() -> None:
    async def main() -> Load:
        load: Load

        async def answer(index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if index == 2:
                load.stop()
            if index % 2:
                await reader.read()
            else:
                writer.write(_GOOD)

        async with _serving(answer) as server:
            load = Load(LoadOptions(base_url=server.url, model="m"))
            await load.run(_plan(8))
            return load

    load = asyncio.run(main())

    assert load.is_stopped
    assert len(load.results) == sum(load.arrived.values()) <= 8
    assert {result.ending for result in load.results} <= {"completed", "interrupted"}
    assert any(result.ending == "interrupted" for result in load.results)
    assert not any(result.is_failed for result in load.results)
    assert load.in_flight == dict.fromkeys(RequestClass, 0)


def test_a_run_stopped_before_it_begins_sends_nothing() -> None:
    async def main() -> tuple[Load, int]:
        async with _serving(_always(_GOOD)) as server:
            load = Load(LoadOptions(base_url=server.url, model="m"))
            load.stop()
            await load.run(_plan(3))
            return load, len(server.bodies)

    load, reached = asyncio.run(main())

    assert (load.results, sum(load.arrived.values()), reached) == ([], 0, 0)


def test_a_run_that_is_cancelled_at_any_moment_has_one_result_for_each_arrival() -> None:
    async def main(steps: int) -> Load:
        async with _serving(_hold) as server:
            load = Load(LoadOptions(base_url=server.url, model="m"))
            running = asyncio.create_task(load.run(_plan(4)))
            for _ in range(steps):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait({running})
            assert running.cancelled()
            return load

    for steps in range(1, 40):
        load = asyncio.run(main(steps))

        assert len(load.results) == sum(load.arrived.values())
        assert all(result.ending == "interrupted" for result in load.results)
        assert sum(load.in_flight.values()) == 0


def test_the_key_is_sent_and_never_shown() -> None:
    options = LoadOptions(base_url="http://127.0.0.1:1", model="m", api_key="sk-hidden")

    _, server = _run(_always(_GOOD), api_key="sk-hidden")

    assert b"authorization: bearer sk-hidden" in server.heads[0].lower()
    assert "sk-hidden" not in repr(options)
