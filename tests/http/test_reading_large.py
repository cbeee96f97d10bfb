"""Large bodies are read in steps, with turns of the event loop between them, and mean the same as read at once."""

import asyncio
import json
from typing import Any

import pytest

from router.errors import ApiError
from router.http import texts
from router.http.decoding import LARGE_BYTES, check_text, is_crowded, look_through
from router.http.head import Head
from router.http.parsing import parse, read_large
from router.request import Endpoint, TokenPrompts

MIB = 2**20
HEAD = Head("r", None, frozenset(), {b"content-type": b"application/json"})


def chat(text: str, **fields: Any) -> bytes:
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": text}], **fields}, ensure_ascii=False
    ).encode()


LARGE = {
    "ascii": chat("a" * 3 * MIB),
    "wide": chat("aé漢😀" * (MIB // 3)),
    "brackets": chat("[" * 3 * MIB),
    "commas": chat("," * 3 * MIB),
    "fields": chat("a", x=[0] * MIB),
}


@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("shift", range(4))
async def test_a_look_in_slices_finds_what_a_look_at_once_does(body: bytes, shift: int) -> None:
    body = b" " * shift + body
    check_text(body)

    assert await look_through(body) == is_crowded(body)


@pytest.mark.parametrize("at", [0, MIB - 1, MIB, 2 * MIB + 7, 3 * MIB - 1])
@pytest.mark.parametrize("broken", [b"\xff", b"\xc3", b"\x80", b"\xed\xa0\x80"])
async def test_a_byte_that_is_no_utf_8_is_found_wherever_it_stands(at: int, broken: bytes) -> None:
    body = b"a" * at + broken + b"a" * (3 * MIB - at - 1) if at < 3 * MIB - 1 else b"a" * at + broken

    with pytest.raises(ApiError) as refused:
        await look_through(body)

    assert f"byte {at} " in str(refused.value.body())


@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE)
async def test_a_large_body_means_the_same_read_in_steps_and_leaves_turns_to_others(body: bytes) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    read = await read_large(Endpoint.CHAT, HEAD, body)
    beside.cancel()

    assert len(body) > LARGE_BYTES
    assert turns >= len(body) // MIB
    assert read is not None
    in_steps = parse(Endpoint.CHAT, "/p", HEAD, body, read)
    assert in_steps == parse(Endpoint.CHAT, "/p", HEAD, body)


def completion(prompt: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt}).encode()


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [([1, 2, 3], (3,)), ([[1], [2, 3]], (1, 2)), ([[7]], (1,)), ([-1, 0], (2,))],
)
async def test_ids_are_counted_the_same_whether_they_are_made_or_not(
    prompt: Any, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = parse(Endpoint.COMPLETIONS, "/p", HEAD, completion(prompt)).prompt
    monkeypatch.setattr(texts, "_IDS_MAX_BYTES", 0)
    counted = parse(Endpoint.COMPLETIONS, "/p", HEAD, completion(prompt)).prompt

    assert made == counted == TokenPrompts(lengths)


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, [2]], [[1], 2], [[1], []], [[[1]]], [[1], [[2]]], 7, ["a", 1], [{}], [1.5], [None]]
)
async def test_what_is_no_list_of_ids_is_refused_the_same_whether_they_are_made_or_not(
    prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ApiError) as made:
        parse(Endpoint.COMPLETIONS, "/p", HEAD, completion(prompt))
    monkeypatch.setattr(texts, "_IDS_MAX_BYTES", 0)

    with pytest.raises(ApiError) as counted:
        parse(Endpoint.COMPLETIONS, "/p", HEAD, completion(prompt))

    assert counted.value.body() == made.value.body()


async def test_a_conversation_of_nothing_but_escapes_is_not_read() -> None:
    few, many = [await look_through(chat("\n" * count)) for count in (3 * MIB, 9_000_000)]

    assert (few, many) == (False, True)


@pytest.mark.parametrize(("lists", "is_one"), [(texts.SEQUENCES_MAX, True), (texts.SEQUENCES_MAX + 1, False)])
async def test_more_lists_of_ids_than_sequences_are_refused_though_none_is_made(lists: int, *, is_one: bool) -> None:
    body = completion([[1_000] * 20] * lists)

    assert len(body) > texts._IDS_MAX_BYTES
    if is_one:
        assert parse(Endpoint.COMPLETIONS, "/p", HEAD, body).prompt == TokenPrompts((20,) * lists)
    else:
        with pytest.raises(ApiError):
            parse(Endpoint.COMPLETIONS, "/p", HEAD, body)
