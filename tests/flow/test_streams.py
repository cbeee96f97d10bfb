"""What a client gets of a stream: every byte of the engine's, but for the one usage chunk that only we asked for."""

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from router.flow.answer import Answer
from router.flow.job import Job
from router.policy.outcome import Outcome
from router.sim.faults import FaultKind
from router.upstream.api import UpstreamError, UpstreamLost, UpstreamTimeout
from router.upstream.sse import Event, EventSplitter
from tests.flow.stack import (
    BATCH,
    CHAT,
    QUICK,
    Stack,
    body_of,
    fault,
    fresh,
    rest_of,
    run,
    sim,
    sim_relay,
    until,
)
from tests.upstream.fakes import STREAM_HEAD, Connection, Script, answer, piece

DONE = b"data: [DONE]\n\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}\n\n'
STREAM = body_of(max_tokens=4, stream=True)
ASKING = body_of(max_tokens=4, stream=True, stream_options={"include_usage": True})


def said(text: str, **choice: Any) -> bytes:
    """One token of a chat."""
    fields = {"index": 0, "delta": {"content": text}, "finish_reason": None, **choice}
    return b"data: " + json.dumps({"choices": [fields]}, ensure_ascii=False).encode() + b"\n\n"


STORY = ROLE + said("你好，世界") + said(" 🙂 caf\u00e9") + said("", finish_reason="stop") + USAGE + DONE


def scripted(pieces: Callable[[], Iterator[bytes]], *, ending: str = "end", head: bytes = STREAM_HEAD) -> Script:
    """An engine that streams `pieces()` to every request, one write each, and then ends, resets or stalls."""

    async def script(connection: Connection) -> None:
        while await connection.request() is not None:
            await connection.send(head)
            for part in pieces():
                await connection.send(piece(part))
                await asyncio.sleep(0)
            if ending == "reset":
                connection.reset()
                return
            if ending == "stall":
                await connection.closed()
                return
            await connection.send(piece(b""))

    return script


async def told(stack: Stack, job: Job) -> tuple[Answer, bytes, UpstreamError | None]:
    """The answer, the bytes that the client got, and what cut them off."""
    answered = await stack.flow.send(job, stack.record())
    got: list[bytes] = []
    with answered:
        try:
            while part := await answered.read():
                got.append(part)
        except UpstreamError as error:
            return answered, b"".join(got), error
    return answered, b"".join(got), None


# -- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flood", [b"\n", b"a\r", b"\r", b": a\n\n"], ids=["blank", "cr", "blank cr", "comments"])
@pytest.mark.parametrize("is_pushed", [False, True], ids=["read", "forward"])
def test_of_a_flood_of_short_lines_a_turn_of_the_loop_looks_at_a_part_and_every_byte_goes_through(
    flood: bytes, is_pushed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flooded = STORY[: -len(DONE)] + flood * 20_000 + b"\n\n" + DONE
    fed: list[int] = []
    feed = EventSplitter.feed

    def seen(splitter: EventSplitter, chunk: bytes) -> list[Event]:
        fed.append(chunk.count(b"\n") + chunk.count(b"\r"))
        return feed(splitter, chunk)

    async def test() -> None:
        async with fresh(chat={"c": scripted(lambda: iter([flooded, flooded]))}) as stack:
            got = bytearray()

            def take(part: bytes) -> bool:
                got.extend(part)
                return True

            with await stack.flow.send(stack.job(body=ASKING), stack.record()) as answered:
                while part := await answered.read():
                    got += part
                    if is_pushed:
                        await answered.forward(take)

            assert bytes(got) == flooded * 2

    monkeypatch.setattr(EventSplitter, "feed", seen)
    run(test())
    assert max(fed) <= 4096


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_wherever_the_network_cuts_a_stream_the_client_gets_its_bytes(
    line_end: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    story = STORY.replace(b"\n", line_end)
    offset = itertools.count()

    def cut() -> Iterator[bytes]:
        at = next(offset)
        return iter([part for part in (story[:at], story[at:]) if part])

    async def test() -> None:
        async with fresh(chat={"c": scripted(cut)}) as stack:
            for _ in range(len(story)):
                _, got, error = await told(stack, stack.job(body=ASKING))

                assert (got, error) == (story, None)
                used = stack.records[-1]
                assert (used.prompt_tokens_used, used.completion_tokens_used) == (7, 3)

    with caplog.at_level(logging.WARNING):
        run(test())
    assert caplog.records == []


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_a_stream_that_comes_byte_by_byte_or_all_at_once_is_the_same_stream(line_end: bytes) -> None:
    story = STORY.replace(b"\n", line_end)
    sizes = iter((1, len(story)))

    def bytes_of() -> Iterator[bytes]:
        size = next(sizes)
        return (story[at : at + size] for at in range(0, len(story), size))

    async def test() -> None:
        async with fresh(chat={"c": scripted(bytes_of)}) as stack:
            for _ in range(2):
                _, got, error = await told(stack, stack.job(body=ASKING))
                assert (got, error) == (story, None)

    run(test())


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_the_usage_chunk_that_only_we_asked_for_is_taken_out_wherever_it_is_cut(line_end: bytes) -> None:
    story = STORY.replace(b"\n", line_end)
    expected = story.replace(USAGE.replace(b"\n", line_end), b"")
    offset = itertools.count(story.index(b'"choices":[]') - 12)

    def cut() -> Iterator[bytes]:
        at = next(offset)
        return iter((story[:at], story[at:]))

    async def test() -> None:
        async with fresh(chat={"c": scripted(cut)}) as stack:
            for _ in range(len(USAGE) + 8):
                _, got, _ = await told(stack, stack.job(body=STREAM))

                assert got == expected
                assert stack.records[-1].completion_tokens_used == 3

    run(test())


def test_comments_pass_and_a_stream_of_comments_is_handed_over_when_it_is_time() -> None:
    ready = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + piece(b": one\n\n"))
        await ready.wait()
        await connection.send(piece(b": two\n\n") + piece(STORY) + piece(b""))

    async def test() -> None:
        async with fresh(chat={"c": script}, commit_after_s=0.05) as stack:
            answered = await stack.flow.send(stack.job(body=ASKING), stack.record())
            with answered:
                assert answered.preface == b": one\n\n"
                assert stack.records[0].first_token_at_s is None
                ready.set()
                got = await rest_of(answered)

            assert got == b": one\n\n: two\n\n" + STORY
            assert stack.records[0].first_token_at_s is not None

    run(test())


def test_an_event_without_its_blank_line_at_the_end_is_completed() -> None:
    async def test() -> None:
        tail = said("bye").removesuffix(b"\n\n")
        async with fresh(chat={"c": scripted(lambda: iter((said("hi"), tail)))}) as stack:
            answered, got, _ = await told(stack, stack.job(body=STREAM))

            assert got == said("hi") + said("bye")
            assert answered.outcome is Outcome.COMPLETED

    run(test())


def test_a_compressed_stream_that_nobody_asked_for_passes_untouched() -> None:
    packed = bytes(range(256)) * 3
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")

    async def test() -> None:
        async with fresh(chat={"c": scripted(lambda: iter((packed[:300], packed[300:])), head=head)}) as stack:
            answered, got, _ = await told(stack, stack.job(body=STREAM))

            assert got == packed
            assert dict(answered.headers)[b"content-encoding"] == b"gzip"

    run(test())


def test_a_plain_answer_larger_than_is_read_ahead_passes_as_it_comes() -> None:
    body = json.dumps(
        {
            "choices": [{"message": {"content": "x" * 3_000_000}}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14},
        }
    ).encode()

    async def script(connection: Connection) -> None:
        while await connection.request() is not None:
            await connection.send(answer(body))

    async def test() -> None:
        async with fresh(chat={"c": script}) as stack:
            answered, got, _ = await told(stack, stack.job())

            assert got == body
            assert answered.outcome is Outcome.COMPLETED
            assert (stack.records[0].prompt_tokens_used, stack.records[0].completion_tokens_used) == (9, 5)

    run(test())


# -- usage ----------------------------------------------------------------------------------------------------------


def usage_chunks(got: bytes) -> int:
    events = [part.removeprefix(b"data: ") for part in got.split(b"\n\n") if part.startswith(b"data: {")]
    return sum(json.loads(event).get("choices") == [] for event in events)


@pytest.mark.parametrize(
    ("stream", "options", "shown"),
    [
        (False, None, 0),
        (False, {}, 0),
        (False, {"include_usage": True}, 0),
        (True, None, 0),
        (True, {}, 0),
        (True, {"include_usage": False}, 0),
        (True, {"include_usage": True}, 1),
        (True, {"include_usage": True, "continuous_usage_stats": True}, 1),
        (True, {"continuous_usage_stats": True}, 0),
    ],
)
@pytest.mark.parametrize("on", ["engine", "relay", "relay without the option"])
def test_the_client_sees_a_usage_chunk_only_where_it_asked_and_every_token_is_metered(
    on: str, stream: bool, options: dict[str, bool] | None, shown: int
) -> None:
    body = body_of(max_tokens=4, stream=stream) | ({} if options is None else {"stream_options": options})

    async def test() -> None:
        relay = sim_relay() if on == "relay" else sim_relay(rejected_fields=frozenset({"stream_options"}))
        async with fresh(relay=relay, chat_settings={"hold_ratio": 0.0}, borrow=False) as stack:
            if on != "engine":
                stack.engines["c"].drain()
            answered, got, error = await told(stack, stack.job(body=body))

            record = stack.records[0]
            assert (answered.status, error) == (200, None)
            if on == "relay without the option" and stream:
                assert usage_chunks(got) == 0
            else:
                assert usage_chunks(got) == shown
                assert record.completion_tokens_used == 4
                assert record.prompt_tokens_used
            name = "c" if on == "engine" else "x"
            for entry in stack.sims[name].log.entries():
                assert "stream_options" not in json.loads(entry.body) or json.loads(entry.body)["stream"]

    run(test())


# -- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "error_type", "outcome"),
    [
        ("reset", UpstreamLost, Outcome.ENGINE_LOST_STREAMING),
        ("stall", UpstreamTimeout, Outcome.ENGINE_TIMEOUT_STREAMING),
    ],
)
def test_a_stream_that_is_cut_gives_what_was_whole_and_says_how_it_ended(
    ending: str, error_type: type[UpstreamError], outcome: Outcome
) -> None:
    half = said("never seen whole")[:-9]

    async def test() -> None:
        settings = {"timeouts": type(QUICK)(5.0, 5.0, 0.1)}
        script = scripted(lambda: iter((said("one"), said("two"), half)), ending=ending)
        async with fresh(chat={"c": script}, chat_settings=settings) as stack:
            answered, got, error = await told(stack, stack.job(body=STREAM))

            assert got == said("one") + said("two")
            assert isinstance(error, error_type)
            assert answered.outcome is outcome
            assert stack.attempts() == {("c", "answered"): 1}

    run(test())


@pytest.mark.parametrize(
    "last",
    [
        b'data: {"error":{"message":"dead","type":"InternalServerError","code":500}}\n\n',
        said("", finish_reason="abort"),
    ],
    ids=["error", "abort"],
)
def test_an_error_or_abort_amid_a_stream_passes_and_is_not_called_completed(last: bytes) -> None:
    async def test() -> None:
        async with fresh(chat={"c": scripted(lambda: iter((said("one"), last, DONE)))}) as stack:
            answered, got, _ = await told(stack, stack.job(body=STREAM))

            assert got == said("one") + last + DONE
            assert answered.outcome is Outcome.ENGINE_LOST_STREAMING

    run(test())


def test_comments_without_an_answer_end_at_the_limit_for_the_first_byte() -> None:
    def for_ever() -> Iterator[bytes]:
        while True:
            yield b": still here\n\n"

    async def test() -> None:
        settings = {"timeouts": type(QUICK)(5.0, 0.2, 5.0)}
        async with fresh(chat={"c": scripted(for_ever)}, chat_settings=settings, commit_after_s=0.05) as stack:
            answered, got, error = await told(stack, stack.job(body=STREAM))

            assert isinstance(error, UpstreamTimeout)
            assert error.phase == "first_byte"
            assert answered.outcome is Outcome.ENGINE_TIMEOUT_STREAMING
            assert set(got.split(b"\n\n")) == {b": still here", b""}

    run(test())


# -- the lease ------------------------------------------------------------------------------------------------------


def test_a_lane_comes_free_with_the_first_token_and_the_tokens_at_the_end() -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + piece(ROLE))
        await go_on.wait()
        await connection.send(piece(said("one")))
        await connection.closed()

    async def test() -> None:
        async with fresh(batch={"l": script}) as stack:
            sending = asyncio.create_task(stack.flow.send(stack.job(BATCH, body=STREAM), stack.record()))
            await until(lambda: stack.records[0].sent_at_s is not None if stack.records else False)
            holdings = [stack.gate.snapshot().engines["l"].held[BATCH]]
            go_on.set()
            answered = await sending
            holdings.append(stack.gate.snapshot().engines["l"].held[BATCH])
            answered.close()
            holdings.append(stack.gate.snapshot().engines["l"].held[BATCH])

            assert [(h.in_prefill, h.tokens) for h in holdings] == [(1, 100), (0, 100), (0, 0)]

    run(test())


def test_an_answer_without_a_cap_is_charged_for_what_it_grows_to() -> None:
    words = [said("word") for _ in range(200)]

    async def test() -> None:
        body = body_of(stream=True)
        async with fresh(chat={"c": scripted(lambda: iter(words), ending="stall")}) as stack:
            job = stack.job(body=body)
            uncapped = type(job.demand)(96, 96, 4, output_is_capped=False)
            answered = await stack.flow.send(type(job)(**_fields(job, demand=uncapped)), stack.record())
            with answered:
                seen = 0
                while part := await answered.read():
                    seen += part.count(b"data:")
                    if seen == 200:
                        break
                charged = stack.committed_tokens

            assert 96 + 200 <= charged <= 96 + 200 + 64

    run(test())


def _fields(job: Job, **changes: Any) -> dict[str, Any]:
    return {name: getattr(job, name) for name in Job.__slots__} | changes


def test_the_simulated_engine_streams_to_the_end() -> None:
    async def test() -> None:
        async with fresh(chat={"c": sim(fault(FaultKind.FIRST_TOKEN_DELAY, 0.01))}) as stack:
            answered, got, _ = await told(stack, stack.job(CHAT, body=STREAM))

            assert got.endswith(DONE)
            assert answered.outcome is Outcome.COMPLETED

    run(test())
