"""What an answer says, also where an engine talks nonsense."""

import json
import random

import pytest

from router.upstream.sse import (
    Event,
    EventSplitter,
    FirstEvent,
    Usage,
    UsageReader,
    body_kind,
    first_event_kind,
    is_usage_only,
    usage_of,
)


def event(data: object, name: str | None = None) -> Event:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    prefix = f"event: {name}\n" if name else ""
    return EventSplitter().feed(f"{prefix}data: {text}\n\n".encode())[0]


ROLE: dict[str, object] = {
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
}
TOKEN: dict[str, object] = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]}
USAGE: dict[str, object] = {"choices": [], "usage": {"prompt_tokens": 18, "total_tokens": 23, "completion_tokens": 5}}


def read(endpoint: str, *events: Event) -> Usage | None:
    reader = UsageReader(endpoint)
    for one in events:
        reader.see(one)
    return reader.usage


def read_body(endpoint: str, body: bytes, size: int = 1000) -> Usage | None:
    reader = UsageReader(endpoint)
    for start in range(0, len(body), size):
        reader.see_body_tail(body[start : start + size])
    return reader.usage


@pytest.mark.parametrize("endpoint", ["chat_completions", "messages", "responses"])
@pytest.mark.parametrize(
    "body",
    [
        USAGE,
        {"usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}},
        {"usage": {"input_tokens": 9, "output_tokens": 2, "cache_read_input_tokens": 3}},
        {"response": {"usage": {"input_tokens": 9, "output_tokens": 2}}},
        {"usage": {"prompt_tokens": "nine"}},
        {"usage": None},
        [],
    ],
)
def test_a_whole_body_tells_what_its_pieces_tell(endpoint: str, body: object) -> None:
    raw = json.dumps(body).encode()

    assert usage_of(raw, endpoint) == read_body(endpoint, raw, size=7)


def test_usage_of_a_chat_stream_is_read_from_its_empty_choices_chunk() -> None:
    assert read("chat_completions", event(ROLE), event(TOKEN), event(USAGE), event("[DONE]")) == Usage(18, 5, None)


def test_usage_of_a_completions_stream_with_cached_tokens_is_read() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}

    assert read("completions", event({"choices": [], "usage": usage})) == Usage(9, 2, 4)


def test_of_a_usage_on_every_chunk_the_last_one_counts() -> None:
    chunks = [event({**TOKEN, "usage": {"prompt_tokens": 9, "completion_tokens": n}}) for n in (1, 2, 3)]

    assert read("chat_completions", *chunks, event({**TOKEN, "usage": None})) == Usage(9, 3)


def test_usage_of_a_responses_stream_is_read_from_its_completed_event() -> None:
    usage = {"input_tokens": 14, "input_tokens_details": {"cached_tokens": 3}, "output_tokens": 5, "total_tokens": 19}
    started = event({"type": "response.created", "response": {"usage": None}}, "response.created")
    completed = event({"type": "response.completed", "response": {"usage": usage}}, "response.completed")

    assert read("responses", started, completed) == Usage(14, 5, 3)


def test_usage_of_a_messages_stream_adds_what_the_cache_held_to_the_prompt() -> None:
    start = event({"type": "message_start", "message": {"usage": {"input_tokens": 18, "output_tokens": 0}}})
    delta = event({"type": "message_delta", "usage": {"output_tokens": 3}})
    cached = {"input_tokens": 2, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 1, "output_tokens": 4}

    assert read("messages", start, delta) == Usage(18, 3)
    assert read("messages", start, event({"type": "message_delta", "usage": cached})) == Usage(19, 4, 16)


@pytest.mark.parametrize(
    ("usage", "known"),
    [
        ({"prompt_tokens": 5, "completion_tokens": True}, Usage(5, 0)),
        ({"prompt_tokens": -1, "total_tokens": 7, "completion_tokens": 2}, Usage(7, 2)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": "3"}}, Usage(5, 2)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "input_tokens_details": {"cached_tokens": 3}}, Usage(5, 2, 3)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None}, Usage(5, 2)),
    ],
)
def test_a_usage_that_is_not_quite_of_the_usual_shape_is_read_field_by_field(
    usage: dict[str, object], known: Usage
) -> None:
    body = json.dumps({"choices": [], "usage": usage}).encode()

    assert read_body("chat_completions", body) == known
    assert read("chat_completions", event(body.decode())) == known


def test_usage_of_an_embeddings_body_needs_no_completion_tokens() -> None:
    assert read_body("embeddings", b'{"data":[],"usage":{"prompt_tokens":7,"total_tokens":7}}') == Usage(7, 0)


@pytest.mark.parametrize("padding", [0, 900_000, 3_000_000])
@pytest.mark.parametrize("gap", ["", " \n "])
def test_usage_of_a_body_of_any_size_is_read(padding: int, gap: str) -> None:
    text = json.dumps('a \\"usage\\":{"prompt_tokens":999} ' + "x" * padding)
    body = f'{{"choices":[{{"text":{text}}}],"usage":{gap}{{"prompt_tokens":5,"completion_tokens":6}},"x":null}}'

    assert read_body("completions", body.encode(), 65_536) == Usage(5, 6)


def test_a_body_over_the_limit_is_not_kept_whole() -> None:
    reader = UsageReader("completions")
    for _ in range(64):
        reader.see_body_tail(b"x" * 65_536)

    assert len(reader._tail) <= 65_536


def test_usage_is_found_in_a_body_that_holds_nan() -> None:
    body = b'{"choices":[{"logprobs":NaN}],"usage":{"prompt_tokens":5,"completion_tokens":6}}'

    assert read_body("completions", body) == Usage(5, 6)


def test_usage_inside_an_event_too_big_to_parse_is_found() -> None:
    usage = '"usage":{"input_tokens":14,"output_tokens":5}'
    raw = f'data: {{"response":{{"output":"{"x" * 300_000}",{usage}}}}}\n\n'.encode()
    splitter = EventSplitter(max_event_bytes=100_000)

    events = [one for start in range(0, len(raw), 9_999) for one in splitter.feed(raw[start : start + 9_999])]

    assert {one.kind for one in events} == {"opaque"}
    assert read("responses", *events) == Usage(14, 5)


@pytest.mark.parametrize(
    "data",
    [
        '{"usage": NaN}',
        '{"usage": {"prompt_tokens": -1, "completion_tokens": "x"}}',
        '{"usage": {"prompt_tokens": 1e400}}',
        '{"usage": {"prompt_tokens": true}}',
        '{"usage": [1], "response": 3, "message": "x"}',
        '{"usage": ' + "[" * 100_000,
        '{"usage": {"prompt_tokens": ' + "9" * 5000 + "}}",
        '["usage"]',
        '"usage"',
        '{"usage":',
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1") + '"usage"',
    ],
)
def test_junk_from_an_engine_teaches_nothing_and_raises_nothing(data: str) -> None:
    one = Event(b"data: " + data.encode("latin-1") + b"\n\n", "data")

    assert read("chat_completions", one) is None
    assert read_body("chat_completions", data.encode("latin-1")) is None
    assert not is_usage_only(one)
    assert first_event_kind(one).kind == "data"


def test_random_json_raises_nothing() -> None:
    rng = random.Random(3)
    values: list[object] = [None, True, -1, 5, "abort", "error", [], {}, [{}], [None], {"usage": {}}, {"code": []}]
    keys = ["usage", "choices", "error", "type", "response", "message", "delta", "finish_reason", "code"]
    for _ in range(2000):
        inner = {rng.choice(keys): rng.choice(values) for _ in range(3)}
        one = event({rng.choice(keys): rng.choice([inner, [inner], rng.choice(values)]) for _ in range(3)})

        assert first_event_kind(one).kind in ("data", "error", "abort")
        is_usage_only(one)
        read(rng.choice(["messages", "responses", "chat_completions"]), one)


def test_only_the_chunk_with_no_choices_and_a_usage_is_the_usage_chunk() -> None:
    assert is_usage_only(event(USAGE))
    others: list[dict[str, object]] = [
        TOKEN,
        {**TOKEN, "usage": USAGE["usage"]},
        {"choices": [], "usage": None},
        {"choices": [], "prompt_filter_results": []},
        {**USAGE, "error": {"code": 503}},
        {"choices": [{"delta": {"content": '"usage"'}}]},
        {"type": "message_delta", "usage": {}},
    ]
    for other in others:
        assert not is_usage_only(event(other))
    assert not is_usage_only(event("[DONE]"))
    assert not is_usage_only(Event(b": usage\n\n", "comment"))


@pytest.mark.parametrize("odd", ["NaN", "-Infinity", "[" * 5_000 + "]" * 5_000], ids=["NaN", "infinity", "deep"])
def test_the_usage_chunk_is_known_also_where_its_usage_cannot_be_read(odd: str) -> None:
    chunk = '{"id":"x","choices": [ ],"usage": {"prompt_tokens":5,"cost":' + odd + "}}"

    assert is_usage_only(event(chunk))
    assert not is_usage_only(event(chunk.replace("[ ]", '[{"index":0}]')))
    assert not is_usage_only(event(chunk.replace('"id":"x"', '"error":{"code":503}')))
    assert not is_usage_only(event(chunk.replace('"id":"x"', '"choices":[{"index":0}]')))
    assert not is_usage_only(event(chunk.replace('"usage": {', '"usage": null,"x": {')))


def test_the_first_event_tells_an_error_inside_a_200_with_its_code() -> None:
    busy = {"error": {"message": "The engine is currently busy", "type": "Service Unavailable", "code": 503}}
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}

    assert first_event_kind(event(busy)) == FirstEvent("error", 503, "The engine is currently busy")
    assert first_event_kind(event(overloaded, "error")) == FirstEvent("error", 503, "busy")
    assert first_event_kind(event({"error": {"code": "429"}})).code == 429
    assert first_event_kind(event({"error": "Unauthorized"})) == FirstEvent("error", None, "Unauthorized")
    assert first_event_kind(event("nonsense", "error")).kind == "error"
    assert body_kind(json.dumps(busy).encode()).code == 503


def test_an_abort_is_one_only_where_no_token_came() -> None:
    empty = {"choices": [{"delta": {"content": ""}, "finish_reason": "abort"}]}
    late = {"choices": [{"delta": {"content": "x"}, "finish_reason": "abort"}]}

    assert first_event_kind(event(empty)).kind == "abort"
    assert first_event_kind(event(late)).kind == "data"
    assert body_kind(b'{"choices":[{"text":"","finish_reason":"abort"}]}').kind == "abort"
    assert body_kind(b'{"choices":[{"message":{"content":"x"},"finish_reason":"abort"}]}').kind == "data"


def test_a_first_event_without_a_token_says_so() -> None:
    tool = {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}
    ended = {"choices": [{"text": "", "finish_reason": "stop"}]}
    delta = {"type": "content_block_delta", "delta": {"text": "x"}}

    assert not first_event_kind(event(ROLE)).has_output
    assert not first_event_kind(event({"type": "message_start", "message": {}}, "message_start")).has_output
    assert not first_event_kind(event({"type": "response.created", "response": {"error": None}})).has_output
    for output in (TOKEN, tool, ended, delta, {"type": "response.output_text.delta", "delta": "x"}):
        assert first_event_kind(event(output)).has_output


def test_comments_and_done_are_told_apart_from_data() -> None:
    assert first_event_kind(Event(b": keep-alive\n\n", "comment")).kind == "comment"
    assert first_event_kind(event("[DONE]")).kind == "done"
