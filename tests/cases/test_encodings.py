"""Compressed bodies, both ways: an answer passes as it is under its true name, a request is unpacked within bounds."""

import gzip
import json
import tracemalloc
import zlib
from typing import Any

import pytest

from tests.cases.house import House, house_of
from tests.http.setting import chat_body
from tests.http.wire import Wire, request
from tests.upstream.fakes import Connection, SeenRequest, answer, piece

CHAT = "/v1/chat/completions"
BODY = json.dumps(chat_body("模 " * 50, max_tokens=2)).encode()
GZIP = {"content-encoding": "gzip"}
BODY_MAX_BYTES = 2**20


# -- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", ["gzip", "identity", None])
@pytest.mark.parametrize("coding", ["br", "zstd"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_coding_that_the_router_does_not_know_passes_untouched_under_its_name(
    house: House, framing: str, coding: str, accepted: str | None
) -> None:
    packed = bytes(range(256)) * 5

    async def answering(_: SeenRequest, connection: Connection) -> None:
        headers = f"content-type: application/json\r\ncontent-encoding: {coding}\r\n"
        if framing == "length":
            await connection.send(answer(packed, headers=headers))
        else:
            head = f"HTTP/1.1 200 OK\r\n{headers}transfer-encoding: chunked\r\n\r\n".encode()
            await connection.send(head + piece(packed[:300]) + piece(packed[300:]) + piece(b""))

    house.engines["c"].answering = answering
    async with Wire(house.port) as wire:
        lines = [] if accepted is None else [f"accept-encoding: {accepted}"]
        await wire.send(request(CHAT, BODY, headers=lines))
        status, headers, body = await wire.answer()

    assert (status, headers["content-encoding"]) == (200, coding)
    assert body == packed
    assert headers.get("content-length", str(len(packed))) == str(len(packed))


async def test_an_answer_without_a_body_has_none_and_its_connection_goes_on(house: House) -> None:
    async def nothing(_: SeenRequest, connection: Connection) -> None:
        await connection.send(b"HTTP/1.1 204 No Content\r\nx-a: b\r\n\r\n")

    async with Wire(house.port) as wire:
        house.engines["c"].answering = nothing
        await wire.send(request(CHAT, BODY))
        empty = await wire.reader.readuntil(b"\r\n\r\n")
        await wire.send(request("/healthz", method="GET"))
        status, _, body = await wire.answer()

    assert empty.startswith(b"HTTP/1.1 204")
    assert b"transfer-encoding" not in empty.lower()
    assert (status, json.loads(body)) == (200, {"status": "ok"})


# -- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", ["gzip", "GZIP"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_gzipped_body_reaches_the_engine_unpacked_with_its_true_length(
    house: House, stream: bool, coding: str
) -> None:
    asking: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = json.dumps(chat_body("模 " * 50, max_tokens=2, **asking)).encode()

    answered = await house.post(CHAT, gzip.compress(body), headers={"content-encoding": coding})

    (call,) = house.engines["c"].calls
    assert answered.status_code == 200
    assert call.body == body
    assert call.all("content-encoding") == []
    assert call.all("content-length") == [str(len(body))]


@pytest.mark.parametrize("size", [1, 17, 10_000])
async def test_a_gzipped_body_may_come_in_chunks_of_any_size_and_in_several_members(house: House, size: int) -> None:
    packed = gzip.compress(BODY[:100]) + gzip.compress(BODY[100:])
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n"

    async with Wire(house.port) as wire:
        await wire.send(head + b"content-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n")
        for at in range(0, len(packed), size):
            await wire.send(piece(packed[at : at + size]))
        await wire.send(piece(b""))
        status, _, _ = await wire.answer()

    assert status == 200
    assert house.engines["c"].calls[0].body == BODY


BROKEN = {
    "cut off": gzip.compress(BODY)[:-12],
    "no gzip": b"\x1f\x8b" + b"x" * 40,
    "plain text": BODY,
    "a wrong checksum": gzip.compress(BODY)[:-8] + bytes(8),
    "something after its end": gzip.compress(BODY) + b"more",
    "zlib": zlib.compress(BODY),
    "nothing": b"",
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_body_that_is_no_gzip_is_a_clients_error_and_reaches_nobody(house: House, how: str) -> None:
    answered = await house.post(CHAT, BROKEN[how], headers=GZIP)

    assert answered.status_code == 400
    assert set(answered.json()["error"]) == {"message", "type", "param", "code"}
    assert house.engines["c"].calls == []


@pytest.mark.parametrize("coding", ["br", "zstd", "deflate", "gzip, gzip", "gzip, br"])
async def test_any_other_coding_of_a_body_is_a_415(house: House, coding: str) -> None:
    answered = await house.post(CHAT, gzip.compress(BODY), headers={"content-encoding": coding})

    assert (answered.status_code, answered.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    assert house.engines["c"].calls == []


@pytest.mark.parametrize("layers", [1, 2])
async def test_a_gzip_bomb_is_a_413_at_the_limit_and_not_at_its_end(layers: int) -> None:
    """A thousandfold expansion, forty times the limit."""
    bomb = gzip.compress(b" " * (40 * BODY_MAX_BYTES))
    async with house_of(server={"body_max_bytes": BODY_MAX_BYTES}) as house:
        tracemalloc.start()
        answers: list[Any] = [await house.post(CHAT, bomb * layers, headers=GZIP) for _ in range(3)]
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert {(each.status_code, each.json()["error"]["code"]) for each in answers} == {(413, "request_too_large")}
        assert peak_bytes < 6 * BODY_MAX_BYTES
        assert house.engines["c"].calls == []


async def test_a_gzipped_body_counts_unpacked_against_the_limit() -> None:
    fits = json.dumps(chat_body(" " * (BODY_MAX_BYTES - 200), max_tokens=2)).encode()
    above = fits + b" " * (BODY_MAX_BYTES + 1 - len(fits))
    async with house_of(server={"body_max_bytes": BODY_MAX_BYTES}) as house:
        taken = await house.post(CHAT, gzip.compress(fits), headers=GZIP)
        refused = await house.post(CHAT, gzip.compress(above), headers=GZIP)

        assert (taken.status_code, refused.status_code) == (200, 413)


async def test_a_gzipped_body_with_a_wrong_key_is_not_unpacked() -> None:
    async with house_of(keys=[{"name": "team", "key": "right"}]) as house:
        answered = await house.post(CHAT, b"no gzip", headers={**GZIP, "authorization": "Bearer wrong"})

        assert answered.status_code == 401
