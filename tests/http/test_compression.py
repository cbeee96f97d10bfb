"""Compressed request bodies: gzip is unpacked within every bound, all else is refused."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.types import Message

from router.errors import ApiError
from router.http.inflate import STEP_MAX_BYTES, Inflater
from router.http.upload import BufferBudget, read_body
from tests.http.scripted import ScriptedEngine
from tests.http.setting import chat_body
from tests.http.stack import Stack, fresh
from tests.http.wire import Wire, request

BODY = json.dumps(chat_body("Hello there. " * 200, max_tokens=2)).encode()
MIB = 2**20


def zeros(size: int) -> bytes:
    """A gzip of `size` zero bytes, about a thousandth of them."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    pieces = [packer.compress(bytes(MIB)) for _ in range(size // MIB)]
    return b"".join([*pieces, packer.flush()])


async def read(packed: bytes, *, max_bytes: int, budget: BufferBudget, encoding: bytes = b"gzip") -> bytes:
    """As the router reads it, the whole of it in one piece."""

    async def receive() -> Message:
        return {"type": "http.request", "body": packed, "more_body": False}

    headers = [(b"content-encoding", encoding)]
    body = await read_body(receive, dict(headers), headers, None, max_bytes, budget)
    budget.give_back(len(body))
    return body


# -- in the router ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gzip", "x-gzip", "GZip"])
async def test_a_gzip_body_reaches_the_engine_plain_with_its_own_length(
    raw: tuple[Stack, ScriptedEngine], name: str
) -> None:
    stack, engine = raw

    answer = await stack.post("/v1/chat/completions", gzip.compress(BODY), headers={"content-encoding": name})

    (call,) = engine.calls
    assert answer.status_code == 200
    assert call.body == BODY
    assert call.all("content-encoding") == []
    assert call.all("content-length") == [str(len(BODY))]


async def test_a_gzip_body_may_come_chunked_and_in_any_pieces(raw: tuple[Stack, ScriptedEngine]) -> None:
    stack, engine = raw
    packed = gzip.compress(BODY)

    async def bytewise() -> AsyncIterator[bytes]:
        for start in range(len(packed)):
            yield packed[start : start + 1]

    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = await stack.client.post("/v1/chat/completions", content=bytewise(), headers=headers)

    assert answer.status_code == 200
    assert [call.body for call in engine.calls] == [BODY]


async def test_a_gzip_body_of_several_members_is_one_body(raw: tuple[Stack, ScriptedEngine]) -> None:
    stack, engine = raw
    packed = b"".join(gzip.compress(BODY[start : start + 100]) for start in range(0, len(BODY), 100))

    answer = await stack.post("/v1/chat/completions", packed, headers={"content-encoding": "gzip"})

    assert answer.status_code == 200
    assert [call.body for call in engine.calls] == [BODY]


async def test_a_small_upload_that_becomes_too_large_is_a_413_and_nothing_of_it_stays() -> None:
    limit = MIB
    async with fresh(server={"body_max_bytes": limit}) as stack:
        sent_before = len(stack.entries("c"))

        answer = await stack.post("/v1/chat/completions", zeros(64 * MIB), headers={"content-encoding": "gzip"})

        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert stack.runtime.state.buffers.used_bytes == 0
        assert len(stack.entries("c")) == sent_before


PACKED = gzip.compress(BODY)
BROKEN = {
    "no gzip": b"{}",
    "nothing": b"",
    "truncated": PACKED[:-1],
    "half": PACKED[: len(PACKED) // 2],
    "head only": PACKED[:10],
    "wrong sum": PACKED[:-8] + bytes(8),
    "damaged": PACKED[:20] + b"\xff\xff\xff" + PACKED[23:],
    "something after it": PACKED + b"x",
    "half a member after it": PACKED + PACKED[:30],
    "members without end": gzip.compress(b"") * 5_000,
    "deflate": zlib.compress(BODY),
}


@pytest.mark.parametrize("packed", BROKEN.values(), ids=BROKEN)
async def test_a_broken_gzip_body_is_a_400_that_says_how(raw: tuple[Stack, ScriptedEngine], packed: bytes) -> None:
    stack, engine = raw

    answer = await stack.post("/v1/chat/completions", packed, headers={"content-encoding": "gzip"})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_gzip")
    assert error["message"].startswith("The gzip body cannot be read: ")
    assert engine.calls == []


async def test_a_client_that_asks_first_is_told_to_send_its_gzip_body(stack: Stack) -> None:
    headers = ["expect: 100-continue", "content-encoding: gzip"]
    whole = request("/v1/chat/completions", PACKED, headers=headers)

    async with Wire(stack.port) as wire:
        await wire.send(whole[: -len(PACKED)])
        go_on = await wire.reader.readuntil(b"\r\n\r\n")
        await wire.send(PACKED)
        status, _, _ = await wire.answer()

    assert go_on == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert status == 200


async def test_the_refusal_of_another_coding_names_what_is_read(stack: Stack) -> None:
    answer = await stack.post("/v1/chat/completions", b"x", headers={"content-encoding": "br"})

    assert answer.status_code == 415
    assert "`gzip`" in answer.json()["error"]["message"]


# -- within bounds ---------------------------------------------------------------------------------------------------


async def test_a_bomb_is_never_held_beyond_the_limit_nor_unpacked_beyond_it() -> None:
    class Watched(BufferBudget):
        most_bytes = 0

        def take(self, size_bytes: int) -> None:
            super().take(size_bytes)
            self.most_bytes = max(self.most_bytes, self.used_bytes)

    budget = Watched(10**9)

    with pytest.raises(ApiError) as refused:
        await read(zeros(256 * MIB), max_bytes=2 * MIB, budget=budget)

    assert refused.value.status == 413
    assert budget.most_bytes <= 2 * MIB
    assert budget.used_bytes == 0


async def test_what_a_body_unpacks_to_counts_against_what_the_process_may_hold() -> None:
    budget = BufferBudget(MIB)

    with pytest.raises(ApiError) as refused:
        await read(zeros(4 * MIB), max_bytes=100 * MIB, budget=budget)

    assert (refused.value.status, refused.value.code) == (429, "request_buffers_full")
    assert budget.used_bytes == 0


def test_no_step_is_longer_than_its_bound_whatever_comes_in() -> None:
    def steps(pieces: Iterator[bytes]) -> list[int]:
        return [len(piece) for piece in pieces]

    inflater = Inflater()
    lengths = steps(inflater.feed(zeros(8 * MIB)))
    inflater.end()

    assert sum(lengths) == 8 * MIB
    assert max(lengths) <= STEP_MAX_BYTES


async def test_others_have_their_turns_while_a_large_body_is_unpacked() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())

    plain = await read(zeros(16 * MIB), max_bytes=64 * MIB, budget=BufferBudget(64 * MIB))
    beside.cancel()

    assert len(plain) == 16 * MIB
    # A turn for each 512 KiB.
    assert turns >= 32


@pytest.mark.parametrize("size", [0, 1, STEP_MAX_BYTES - 1, STEP_MAX_BYTES, STEP_MAX_BYTES + 1, 3 * STEP_MAX_BYTES])
async def test_every_size_around_a_step_comes_back_as_it_was(size: int) -> None:
    plain: Any = bytes(range(256)) * (size // 256 + 1)

    unpacked = await read(gzip.compress(plain[:size]), max_bytes=10**7, budget=BufferBudget(10**7))

    assert unpacked == plain[:size]
