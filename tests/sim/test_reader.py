"""What a stream says: the outcome of a 200 is decided by its content, not by its status."""

import json

import pytest

from router.sim.reader import GAPS_MAX, AnswerReader, Ending, error_reason, http_ending

_ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
_DONE = b"data: [DONE]\n\n"


def _content(text: str, finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


def _event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _read(*pieces: tuple[float, bytes]) -> AnswerReader:
    reader = AnswerReader()
    for at_s, data in pieces:
        reader.feed(data, at_s)
    return reader


def test_the_first_token_is_the_first_content_not_the_role_chunk() -> None:
    reader = _read(
        (1.0, _event(_ROLE)), (2.0, _event(_content("a"))), (3.5, _event(_content("b", "stop"))), (4.0, _DONE)
    )

    assert (reader.first_content_at_s, reader.last_content_at_s) == (2.0, 3.5)
    assert list(reader.gaps_s) == [1.5]
    assert reader.ending(broke=None) == (Ending.COMPLETED, "")


def test_tokens_are_from_usage_however_many_came_in_a_chunk() -> None:
    reader = _read(
        (1.0, _event(_content("a b c d")) + _event(_content("e f", "length"))), (2.0, _event(_usage(9, 6)) + _DONE)
    )

    assert (reader.prompt_tokens, reader.completion_tokens, reader.content_chunks) == (9, 6, 2)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_bytes_split_anywhere_read_the_same(newline: bytes) -> None:
    stream = b": hello\n\n" + _event(_ROLE) + _event(_content("é{}\\n")) + _event(_usage(3, 1)) + _DONE
    stream = stream.replace(b"\n\n", newline * 2)

    reader = AnswerReader()
    for place in range(len(stream)):
        reader.feed(stream[place : place + 1], 1.0)

    assert reader.ending(broke=None) == (Ending.COMPLETED, "")
    assert (reader.content_chunks, reader.completion_tokens) == (1, 1)


@pytest.mark.parametrize(
    "delta", [{"reasoning_content": "x"}, {"reasoning": "x"}, {"tool_calls": [{"index": 0}]}, {"content": "x"}]
)
def test_reasoning_and_tool_calls_are_content(delta: dict[str, object]) -> None:
    reader = _read((1.0, _event({"choices": [{"delta": delta}]}) + _DONE))

    assert reader.ending(broke=None)[0] is Ending.COMPLETED


def test_an_error_inside_a_200_stream_is_an_error_even_after_content() -> None:
    error = {"error": {"message": "no room", "type": "server_error", "code": 503}}
    reader = _read((1.0, _event(_content("a"))), (2.0, _event(error) + _DONE))

    assert reader.ending(broke=None) == (Ending.ERROR_IN_STREAM, "503: no room")


@pytest.mark.parametrize(
    ("finish_reason", "ending"), [("abort", Ending.ABORT_FINISH), ("error", Ending.ERROR_IN_STREAM)]
)
def test_an_abort_is_a_failure_even_after_content(finish_reason: str, ending: Ending) -> None:
    reader = _read((1.0, _event(_content("a")) + _event(_content("", finish_reason)) + _DONE))

    assert reader.ending(broke=None)[0] is ending


@pytest.mark.parametrize("stream", [b"", _DONE, _event(_ROLE) + _DONE, _event(_usage(5, 0)) + _DONE, b": ping\n\n"])
def test_a_stream_without_content_is_empty_and_no_success(stream: bytes) -> None:
    reader = _read((1.0, stream))

    assert reader.ending(broke=None)[0] is Ending.EMPTY_STREAM


def test_a_stream_without_its_end_is_cut() -> None:
    reader = _read((1.0, _event(_content("a"))))

    assert reader.ending(broke=None) == (Ending.CUT, "ended before [DONE]")
    assert reader.ending(broke="ReadError: reset") == (Ending.CUT, "ReadError: reset")


def test_a_last_event_without_its_blank_line_is_lost_as_the_clients_lose_it() -> None:
    reader = _read((1.0, _event(_content("a")) + _DONE.rstrip(b"\n") + b"\n"))

    assert reader.ending(broke=None)[0] is Ending.CUT


@pytest.mark.parametrize(
    "data", [b"data: not json\n\n", b"data: [1]\n\n", b'data: {"choices": 3}\n\n', b"data: \xff\n\n"]
)
def test_an_event_that_is_no_chunk_is_an_error(data: bytes) -> None:
    reader = _read((1.0, _event(_content("a")) + data + _DONE))

    assert reader.ending(broke=None)[0] is Ending.ERROR_IN_STREAM


def test_what_is_kept_of_a_long_answer_is_bounded() -> None:
    reader = AnswerReader()
    for step in range(GAPS_MAX + 10):
        reader.feed(_event(_content("a")), float(step))
    endless = AnswerReader()
    for _ in range(9):
        endless.feed(b"data: " + b"x" * (1024 * 1024), 1.0)

    assert len(reader.gaps_s) == GAPS_MAX
    assert reader.content_chunks == GAPS_MAX + 10
    assert endless.ending(broke=None)[0] is Ending.ERROR_IN_STREAM


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"error": {"message": "full", "type": "rate_limit_error", "code": "chat_full"}}, "chat_full: full"),
        ({"error": {"message": "full", "type": "rate_limit_error", "code": None}}, "rate_limit_error: full"),
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"error": {"message": "x" * 500}}, "x" * 200),
        ({}, ""),
        ([1], ""),
    ],
)
def test_a_refusal_is_told_in_one_line(body: object, reason: str) -> None:
    assert error_reason(body) == reason
    assert http_ending(429) == "http_429"
