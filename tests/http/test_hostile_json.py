"""JSON made to hurt: a 400 or the engine's own answer, from the same process, and never a 500."""

import json

import pytest

from router.http.routes import INFERENCE_PATHS
from tests.http.scripted import COMPLETION, ScriptedEngine, says
from tests.http.stack import Stack

MESSAGES = b'"messages":[{"role":"user","content":"x"}]'
BEFORE = b'{"model":"llama","max_tokens":2,' + MESSAGES


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * depth + closing * depth


def objects(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


PLACES = {
    "alone": b"%b",
    "in an unknown field": BEFORE + b',"x":%b}',
    "in tools": BEFORE + b',"tools":[{"type":"function","function":{"name":"f","parameters":{"p":%b}}}]}',
    "in a message": b'{"model":"llama","messages":[{"role":"user","content":%b}]}',
    "in template options": BEFORE + b',"chat_template_kwargs":{"x":%b}}',
    "in a field that is taken out": BEFORE + b',"priority":%b}',
    "in the model": b'{"model":%b,' + MESSAGES + b"}",
    "in stream options": BEFORE + b',"stream":true,"stream_options":{"x":%b}}',
}


@pytest.mark.parametrize("depth", [2_000, 100_000])
@pytest.mark.parametrize("kind", ["arrays", "objects"])
@pytest.mark.parametrize("place", PLACES)
async def test_deep_nesting_is_a_clients_error(stack: Stack, place: str, kind: str, depth: int) -> None:
    value = nested(depth) if kind == "arrays" else objects(depth)

    answer = await stack.post("/v1/chat/completions", PLACES[place].replace(b"%b", value))

    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("depth", [10, 100, 800, 900, 950, 990, 1_010])
@pytest.mark.parametrize("place", PLACES)
async def test_nesting_around_what_the_parser_can_take_is_never_the_routers_failure(
    stack: Stack, place: str, depth: int
) -> None:
    answer = await stack.post("/v1/chat/completions", PLACES[place].replace(b"%b", objects(depth)))

    assert answer.status_code in (200, 400)


ODD_VALUES = {
    "a 5,000-digit number": b"7" * 5_000,
    "a 5,000-digit fraction": b"0." + b"7" * 5_000,
    "a huge exponent": b"1e999999",
    "a tiny exponent": b"1e-999999",
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "minus infinity": b"-Infinity",
    "a leading zero": b"007",
    "a lone surrogate": b'"\\ud800"',
    "a NUL": b'"\\u0000"',
    "a raw control character": b'"\x01"',
    "a trailing comma": b"[1,]",
    "a comment": b"1/*x*/",
    "single quotes": b"'x'",
}


@pytest.mark.parametrize("place", ["in an unknown field", "in tools", "in a message", "in the model", "alone"])
@pytest.mark.parametrize("value", ODD_VALUES)
async def test_odd_values_are_a_clients_error_or_the_engines_to_judge(stack: Stack, place: str, value: str) -> None:
    body = PLACES[place].replace(b"%b", ODD_VALUES[value])

    answer = await stack.post("/v1/chat/completions", body)

    assert answer.status_code in (200, 400, 404)
    if answer.status_code == 200:
        assert stack.sent_for(answer).body == body


@pytest.mark.parametrize("field", ["max_tokens", "n", "max_completion_tokens"])
@pytest.mark.parametrize("value", ["7" * 5_000, "1e400", "-1e400", "2e9", "NaN"])
async def test_a_number_of_tokens_that_is_none_is_refused(stack: Stack, field: str, value: str) -> None:
    answer = await stack.post(
        "/v1/chat/completions", f'{{"model":"llama","{field}":{value},'.encode() + MESSAGES + b"}"
    )

    assert answer.status_code == 400


@pytest.mark.parametrize("path", sorted(set(INFERENCE_PATHS) - {"/v1/audio/transcriptions", "/v1/audio/translations"}))
@pytest.mark.parametrize(
    "body", [b"", b"[]", b"nul", b'{"model":', nested(5_000), b"\xff\xfe{\x00}\x00", b'{"model":{"a":[]}}', b"{}" * 2]
)
async def test_every_route_refuses_what_is_no_object_of_its_kind(stack: Stack, path: str, body: bytes) -> None:
    answer = await stack.post(path, body)

    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("prompt", [b'"a"', b"[1]"])
async def test_a_list_of_hundreds_of_thousands_of_prompts_is_told_to_be_split(stack: Stack, prompt: bytes) -> None:
    answer = await stack.post(
        "/v1/completions", b'{"model":"llama","prompt":[' + (prompt + b",") * 300_000 + prompt + b"]}"
    )

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
async def test_an_engines_answer_with_odd_numbers_is_passed_on_untouched(
    raw: tuple[Stack, ScriptedEngine], number: bytes
) -> None:
    stack, engine = raw
    body = COMPLETION.replace(b'"finish_reason":"stop"', b'"logprobs":{"content":[{"logprob":%b}]}' % number)
    engine.answering = says(body)

    answer = await stack.chat()

    assert (answer.status_code, answer.content) == (200, body)


async def test_the_same_process_serves_on_after_all_of_it(stack: Stack) -> None:
    answer = await stack.chat(max_tokens=2)

    assert json.loads(answer.content)["usage"]["completion_tokens"] == 2
