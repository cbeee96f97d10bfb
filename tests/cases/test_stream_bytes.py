"""A stream reaches its client byte for byte wherever the wire cuts it, in its reader's pace, and with a whole end."""

import asyncio
import json
import socket
from typing import Any

import openai
import pytest

from tests.cases.house import CaseEngine, House, house_of, leave, sent
from tests.cases.sockets import bytes_read, bytes_written
from tests.http.scripted import DONE, chunk, says
from tests.http.setting import chat_body
from tests.http.stack import still, until
from tests.http.wire import request
from tests.upstream.fakes import STREAM_HEAD, Connection, SeenRequest, piece

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
STORY = (chunk("你好，世界"), chunk(" 🙂 café"), LAST, USAGE, DONE)
ASKING = {"stream": True, "stream_options": {"include_usage": True}}
BODY = json.dumps(chat_body(**ASKING)).encode()
STREAM = request("/v1/chat/completions", BODY)
ERROR = b'data: {"error":{"message":"out of memory","type":"InternalServerError","param":null,"code":500}}\n\n'


def on_the_wire(events: tuple[bytes, ...], line_end: bytes) -> bytes:
    """A whole answer as the engine writes it: head, chunks, end."""
    return STREAM_HEAD + b"".join(piece(event.replace(b"\n", line_end)) for event in events) + piece(b"")


async def metered(house: House, kind: str) -> float:
    return (await house.metrics()).value("router_tokens_total", kind=kind)


# -- cuts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
async def test_cut_in_two_at_any_byte_of_the_wire_a_stream_is_the_same_and_metered_once(
    house: House, line_end: bytes
) -> None:
    wire_bytes = on_the_wire(STORY, line_end)
    expected = b"".join(STORY).replace(b"\n", line_end)
    cuts = iter(range(1, len(wire_bytes)))

    async def cut(_: SeenRequest, connection: Connection) -> None:
        at = next(cuts)
        await connection.send(wire_bytes[:at])
        # Whoever reads gets its turn before the rest comes.
        for _step in range(3):
            await asyncio.sleep(0)
        await connection.send(wire_bytes[at:])

    house.engines["c"].answering = cut
    before = (await metered(house, "prompt"), await metered(house, "completion"))
    wire = await sent(house, b"")
    seen: set[bytes] = set()
    for _ in range(len(wire_bytes) - 1):
        await wire.send(STREAM)
        seen.add((await wire.answer())[2])
    await leave(wire, "close")
    await until(lambda: house.runtime.state.in_flight == 0)
    after = (await metered(house, "prompt"), await metered(house, "completion"))

    calls = len(wire_bytes) - 1
    assert seen == {expected}
    assert (after[0] - before[0], after[1] - before[1]) == (7 * calls, 3 * calls)
    assert [line for line in house.log.lines if line.levelname == "WARNING"] == []


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
async def test_a_stream_that_comes_in_pieces_of_any_size_is_the_same_stream(
    house: House, size: int, line_end: bytes
) -> None:
    wire_bytes = on_the_wire(STORY, line_end)

    async def pieces(_: SeenRequest, connection: Connection) -> None:
        for at in range(0, len(wire_bytes), size):
            await connection.send(wire_bytes[at : at + size])
            await asyncio.sleep(0)

    house.engines["c"].answering = pieces
    answer = await house.post("/v1/chat/completions", BODY)

    assert answer.content == b"".join(STORY).replace(b"\n", line_end)


async def test_the_first_token_reaches_the_client_before_the_second_is_made(house: House) -> None:
    made = 1

    async def one_by_one(_: SeenRequest, connection: Connection) -> None:
        nonlocal made
        await connection.send(STREAM_HEAD + piece(chunk("1")))
        for number in range(2, 6):
            await seen[number - 1].wait()
            made = number
            await connection.send(piece(chunk(str(number))))
        await connection.send(piece(DONE) + piece(b""))

    seen = {number: asyncio.Event() for number in range(1, 6)}
    house.engines["c"].answering = one_by_one
    wire = await sent(house, STREAM)
    status, headers = await wire.head()
    for number in range(1, 6):
        await wire.reader.readuntil(chunk(str(number)))
        assert made == number
        seen[number].set()
    await wire.reader.readuntil(DONE + b"\r\n0\r\n\r\n")
    await leave(wire, "close")

    assert (status, headers["x-accel-buffering"], headers["cache-control"]) == (200, "no", "no-cache")
    assert "content-length" not in headers


# -- ends -----------------------------------------------------------------------------------------------------------


def playing(ending: str) -> Any:
    """Two tokens, and then an end of some kind."""

    async def play(_: SeenRequest, connection: Connection) -> None:
        await connection.send(STREAM_HEAD + piece(chunk("a")) + piece(chunk("b")))
        if ending == "reset":
            await asyncio.sleep(0.02)
            connection.reset()
        elif ending == "silence":
            await connection.closed()
        elif ending == "error event":
            await connection.send(piece(ERROR) + piece(DONE) + piece(b""))
        elif ending == "half an event":
            await connection.send(piece(chunk("c")[:-9]))
            await asyncio.sleep(0.02)
            connection.reset()
        elif ending == "no end mark":
            await asyncio.sleep(0.02)
            connection.writer.close()
        else:
            await connection.send(piece(LAST.removesuffix(b"\n\n")) + piece(b""))

    return play


ENDINGS = {
    "reset": "engine_lost",
    "half an event": "engine_lost",
    "no end mark": "engine_lost",
    "silence": "engine_timeout",
    "error event": None,
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_stream_that_fails_ends_in_one_whole_error_event_and_the_openai_client_raises(ending: str) -> None:
    settings = {"timeouts": {"idle_s": 0.2}}
    async with house_of(chat_settings=settings) as house:
        house.engines["c"].answering = playing(ending)
        answer = await house.post("/v1/chat/completions", BODY)
        await until(lambda: house.serves("c"))
        texts, raised = await read_by_openai(house)
        house.engines["c"].answering = says()

        events = answer.content.split(b"\n\n")
        assert answer.content.startswith(chunk("a") + chunk("b"))
        assert (len(events), events[-2:]) == (5, [b"data: [DONE]", b""])
        error = json.loads(events[2].removeprefix(b"data: "))["error"]
        if ending == "error event":
            assert events[2] + b"\n\n" == ERROR
        else:
            assert {"message", "type", "code"} <= set(error)
            assert (error["type"], error["code"]) == ("server_error", ENDINGS[ending])
        assert b'finish_reason":"' not in answer.content
        assert (texts, raised) == (["a", "b"], error["message"])


async def read_by_openai(house: House) -> tuple[list[str], str]:
    """What the official client gets of a stream, and the message that it raises."""
    texts: list[str] = []
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        stream: Any = await client.chat.completions.create(
            model="llama", messages=[{"role": "user", "content": "x"}], stream=True
        )
        try:
            async for part in stream:
                texts.append(part.choices[0].delta.content)  # noqa: PERF401  what came before the error counts
        except openai.APIError as error:
            return texts, error.message
    return texts, ""


async def test_the_openai_client_gets_a_last_event_whose_blank_line_the_engine_left_out(house: House) -> None:
    house.engines["c"].answering = playing("no blank line")

    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        stream: Any = await client.chat.completions.create(
            model="llama", messages=[{"role": "user", "content": "x"}], stream=True
        )
        parts = [part async for part in stream]

    assert [part.choices[0].finish_reason for part in parts] == [None, None, "stop"]


# -- readers --------------------------------------------------------------------------------------------------------

EVENT = piece(chunk("x" * 10_000))
#: What the router may hold of one stream: a client's buffer that is not full yet, what came before its task had a turn,
#: with one read from the engine more, and an event that is not whole. Mostly that is one read alone.
HELD_MAX_BYTES = (64 + 64 + 256) * 1024 + len(EVENT)
PART = piece(chunk("x" * 100_000))


@pytest.mark.parametrize(
    "body", [STREAM, request("/v1/chat/completions", json.dumps(chat_body()).encode())], ids=["stream", "plain"]
)
async def test_while_a_client_does_not_read_its_engine_is_not_read_either(body: bytes) -> None:
    written = 0

    async def torrent(_: SeenRequest, connection: Connection) -> None:
        nonlocal written
        await connection.send(STREAM_HEAD)
        try:
            while written < 200_000_000:
                await connection.send(EVENT)
                written += len(EVENT)
        except ConnectionError:
            engine.taken_back += 1

    engine = CaseEngine(torrent)
    # Engines of its own: what is read from a connection is counted from its beginning.
    async with house_of(chat={"c": engine}) as house:
        # No stream of asyncio's, which would read ahead.
        with socket.create_connection(("127.0.0.1", house.port)) as client:
            client.sendall(body)
            written_by_engine = await still(lambda: written)
            held = bytes_read(engine.port) - bytes_written(house.port, client.getsockname()[1])
        await until(lambda: engine.taken_back == 1)
        engine.answering = says()

    assert 1_000_000 < written_by_engine < 200_000_000
    assert held < HELD_MAX_BYTES


async def test_slow_readers_get_every_byte_and_hold_up_nobody(house: House) -> None:
    """Four clients of 4 MB that read in sips, and one that reads at once and is done first."""
    parts = 40
    expected = chunk("x" * 100_000) * parts + DONE

    async def answering(_: SeenRequest, connection: Connection) -> None:
        await connection.send(STREAM_HEAD)
        for _ in range(parts):
            await connection.send(PART)
        await connection.send(piece(DONE) + piece(b""))

    async def sips() -> bytes:
        wire = await sent(house, STREAM)
        await wire.head()
        await fast_is_done.wait()
        body = bytearray()
        while size := int(await wire.reader.readuntil(b"\r\n"), 16):
            body += await wire.reader.readexactly(size)
            await wire.reader.readexactly(2)
            await asyncio.sleep(0)
        await leave(wire, "close")
        return bytes(body)

    fast_is_done = asyncio.Event()
    house.engines["c"].answering = answering
    slow = [asyncio.create_task(sips()) for _ in range(4)]
    await until(lambda: len(house.engines["c"].calls) == 4)
    fast = await house.post("/v1/chat/completions", BODY)
    fast_is_done.set()
    bodies = await asyncio.gather(*slow)

    assert fast.content == expected
    assert bodies == [expected] * 4
