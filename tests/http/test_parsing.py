"""A body as it is read: what is decoded, what is only looked over, and how a client's mistakes are named."""

import json
from typing import Any

import msgspec
import pytest

from router.errors import ApiError
from router.http.bodies import (
    ChatBody,
    CompletionsBody,
    GenerationBody,
    MessagesBody,
    PoolingBody,
    ResponsesBody,
)
from router.http.head import Head
from router.http.parsing import parse
from router.request import (
    PREFIX_MAX_BYTES,
    ChatPrompt,
    Endpoint,
    OpaquePrompt,
    ParsedRequest,
    TextPrompts,
    TokenPrompts,
)

USER = {"role": "user", "content": "Hello."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
#: A body that is well-formed, for each kind.
PLAIN: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {"model": "m", "messages": [USER]},
    Endpoint.COMPLETIONS: {"model": "m", "prompt": "Hello."},
    Endpoint.RESPONSES: {"model": "m", "input": "Hello."},
    Endpoint.MESSAGES: {"model": "m", "messages": [USER], "max_tokens": 5},
    Endpoint.EMBEDDINGS: {"model": "m", "input": "Hello."},
    Endpoint.RERANK: {"model": "m", "query": "Hello.", "documents": ["a", "b"]},
}
BODIES: dict[Endpoint, type[GenerationBody]] = {
    Endpoint.CHAT: ChatBody,
    Endpoint.COMPLETIONS: CompletionsBody,
    Endpoint.RESPONSES: ResponsesBody,
    Endpoint.MESSAGES: MessagesBody,
    Endpoint.RERANK: PoolingBody,
}
FIELDS = [(endpoint, name) for endpoint, body in BODIES.items() for name in body.__struct_encode_fields__]


def read(endpoint: Endpoint, body: bytes | dict[str, Any]) -> ParsedRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(endpoint, "/path", Head("id", None, frozenset(), {b"content-type": b"application/json"}), raw)


def refused(endpoint: Endpoint, body: bytes | dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as error:
        read(endpoint, body)
    assert error.value.status == 400
    return error.value


def with_field(endpoint: Endpoint, name: str, value: bytes) -> bytes:
    """A plain body in which `name` is `value`, as the last of its name."""
    return json.dumps(PLAIN[endpoint]).encode()[:-1] + b', "%b": %b}' % (name.encode(), value)


@pytest.mark.parametrize("depth", [2_000, 100_000])
@pytest.mark.parametrize(("opening", "inmost", "closing"), [(b"[", b"", b"]"), (b'{"a":', b"1", b"}")])
@pytest.mark.parametrize(("endpoint", "name"), [*FIELDS, (Endpoint.CHAT, "unheard_of")])
def test_nesting_too_deep_is_a_clients_error_in_every_field(
    endpoint: Endpoint, name: str, opening: bytes, inmost: bytes, closing: bytes, depth: int
) -> None:
    error = refused(endpoint, with_field(endpoint, name, opening * depth + inmost + closing * depth))

    assert error.code in ("invalid_json", "invalid_request")


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-", b"007", b"1e", b"'x'", b"[1,]", b'"\x01"', b"{1:2}", b""])
@pytest.mark.parametrize(("endpoint", "name"), [*FIELDS, (Endpoint.CHAT, "unheard_of")])
def test_what_is_no_json_is_a_clients_error_in_every_field(endpoint: Endpoint, name: str, value: bytes) -> None:
    error = refused(endpoint, with_field(endpoint, name, value))

    assert error.code in ("invalid_json", "invalid_request")


@pytest.mark.parametrize(
    "value", [b"1e3", b"1.5", b'"5"', b"true", b"[]", b"7" * 5_000, b"1e400", b"-1", b"2147483648"]
)
@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        (Endpoint.CHAT, "max_tokens"),
        (Endpoint.CHAT, "max_completion_tokens"),
        (Endpoint.CHAT, "n"),
        (Endpoint.COMPLETIONS, "max_tokens"),
        (Endpoint.COMPLETIONS, "best_of"),
        (Endpoint.RESPONSES, "max_output_tokens"),
        (Endpoint.MESSAGES, "max_tokens"),
    ],
)
def test_a_number_of_tokens_that_is_none_is_refused_by_name(endpoint: Endpoint, name: str, value: bytes) -> None:
    error = refused(endpoint, with_field(endpoint, name, value))

    assert name in error.message
    assert error.param == name


@pytest.mark.parametrize(
    ("endpoint", "name", "value", "param"),
    [
        (Endpoint.CHAT, "messages", 5, "messages"),
        (Endpoint.CHAT, "messages", None, "messages"),
        (Endpoint.CHAT, "messages", [USER, "x"], "messages[1]"),
        (Endpoint.CHAT, "messages", [], "messages"),
        (Endpoint.CHAT, "tools", {}, "tools"),
        (Endpoint.CHAT, "tools", [TOOL, 5], "tools[1]"),
        (Endpoint.CHAT, "documents", ["x"], "documents[0]"),
        (Endpoint.CHAT, "chat_template_kwargs", [], "chat_template_kwargs"),
        (Endpoint.CHAT, "stream_options", 1, "stream_options"),
        (Endpoint.CHAT, "model", {}, "model"),
        (Endpoint.MESSAGES, "messages", ["x"], "messages[0]"),
        (Endpoint.MESSAGES, "tools", "x", "tools"),
        (Endpoint.RESPONSES, "input", 5, "input"),
        (Endpoint.RESPONSES, "input", None, "input"),
        (Endpoint.RESPONSES, "tools", [1], "tools[0]"),
        (Endpoint.COMPLETIONS, "prompt", {"a": 1}, "prompt"),
        (Endpoint.EMBEDDINGS, "input", [["x"]], "input"),
        (Endpoint.EMBEDDINGS, "messages", [1], "messages[0]"),
    ],
)
def test_a_wrong_type_is_named_with_its_place(endpoint: Endpoint, name: str, value: Any, param: str) -> None:
    error = refused(endpoint, {**PLAIN[endpoint], name: value})

    assert error.param == param
    assert f"`{param}`" in error.message


@pytest.mark.parametrize("name", ["messages", "tools", "max_tokens", "stream", "model"])
def test_of_two_fields_with_one_name_the_last_is_read_however_it_is_spelled(name: str) -> None:
    last = {"messages": [{"role": "user", "content": "last"}], "tools": [TOOL], "max_tokens": 7, "stream": True}
    escaped = f"\\u{ord(name[0]):04x}{name[1:]}".encode()
    first = json.dumps({**PLAIN[Endpoint.CHAT], "max_tokens": 1, name: last.get(name, "x")}).encode()

    both = first[:-1] + b', "%b": %b}' % (escaped, json.dumps(last.get(name, "last")).encode())
    request = read(Endpoint.CHAT, both)

    prompt = request.prompt
    assert isinstance(prompt, ChatPrompt)
    found = {
        "messages": prompt.messages,
        "tools": prompt.tool_list(),
        "max_tokens": request.max_tokens,
        "stream": request.stream,
        "model": request.model,
    }
    assert found[name] == last.get(name, "last")
    assert request.body == both


def test_tools_stay_json_until_they_are_asked_for() -> None:
    prompt = read(Endpoint.CHAT, {**PLAIN[Endpoint.CHAT], "tools": [TOOL]}).prompt

    assert isinstance(prompt, ChatPrompt)
    assert isinstance(prompt.tools, msgspec.Raw)
    assert prompt.tool_list() == [TOOL]


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_are_none(tools: Any) -> None:
    prompt = read(Endpoint.CHAT, {**PLAIN[Endpoint.CHAT], "tools": tools}).prompt

    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools is None


def test_null_is_as_good_as_absent_where_the_engine_takes_it_so() -> None:
    nulls = dict.fromkeys(("stream", "max_tokens", "n", "documents", "chat_template_kwargs", "stream_options"))

    request = read(Endpoint.CHAT, {**PLAIN[Endpoint.CHAT], **nulls})

    assert request.prompt == ChatPrompt([USER], bytes_total=len(request.body))
    assert (request.stream, request.max_tokens, request.n, request.edits) == (False, None, 1, {})


@pytest.mark.parametrize(
    "body",
    [
        with_field(Endpoint.CHAT, "tools", b"[" + b"{}," * 200_000 + b"{}]"),
        with_field(Endpoint.CHAT, "messages", b"[" + b'{"role":"user","content":"x"},' * 200_000 + b"{}]"),
        with_field(Endpoint.CHAT, "chat_template_kwargs", b'{"a":[' + b'"a",' * 1_100_000 + b"1]}"),
    ],
    ids=["tools", "messages", "template options"],
)
def test_a_body_crowded_with_values_is_not_decoded_and_its_size_stands_in(body: bytes) -> None:
    assert read(Endpoint.CHAT, body).prompt == OpaquePrompt(len(body))


def test_a_long_text_with_few_brackets_is_read_whatever_its_size() -> None:
    text = "a line of prose, and another. " * 30_000

    prompt = read(Endpoint.CHAT, {"model": "m", "messages": [{"role": "user", "content": text}]}).prompt

    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0]["content"] == text


def test_texts_full_of_brackets_are_each_a_prompt() -> None:
    texts = ["{[" * 100] * 2_000

    prompt = read(Endpoint.EMBEDDINGS, {"model": "m", "input": texts}).prompt

    assert prompt == TextPrompts(tuple(texts))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("x", TextPrompts(("x",))),
        ("", TextPrompts(("",))),
        (["x", "[{"], TextPrompts(("x", "[{"))),
        ([1, 2, 3], TokenPrompts((3,))),
        ([[1, 2], [3]], TokenPrompts((2, 1))),
        ([[1]] * 16_384, TokenPrompts((1,) * 16_384)),
    ],
)
def test_prompts_of_each_kind_are_known(value: Any, expected: Any) -> None:
    assert read(Endpoint.COMPLETIONS, {"model": "m", "prompt": value}).prompt == expected


@pytest.mark.parametrize(
    "value", [[], [[]], [1, "x"], ["x", 1], [[1], []], [[1], 2], [1.0], [True], [[[1]]], [[1]] * 16_385, [None], 5]
)
def test_prompts_of_no_kind_or_too_many_are_refused(value: Any) -> None:
    assert refused(Endpoint.COMPLETIONS, {"model": "m", "prompt": value}).param == "prompt"


@pytest.mark.parametrize(
    ("endpoint", "body", "prefix"),
    [
        (
            Endpoint.CHAT,
            b'{"model":"m","messages": [{"role":"user","content":"x"}] }',
            b'[{"role":"user","content":"x"}]',
        ),
        (Endpoint.COMPLETIONS, b'{"model":"m","prompt":"a b"}', b'"a b"'),
        (Endpoint.RESPONSES, b'{"input":"x","model":"m","instructions":"i"}', b'"i""x"'),
        (
            Endpoint.MESSAGES,
            b'{"max_tokens":1,"messages":[{"role":"user","content":"x"}],"system":"s"}',
            b'"s"[{"role":"user","content":"x"}]',
        ),
        (Endpoint.EMBEDDINGS, b'{"model":"m","input":"x"}', b""),
        (Endpoint.TOKENIZE, b'{"model":"m","prompt":"x"}', b""),
    ],
)
def test_the_beginning_of_a_prompt_is_its_json(endpoint: Endpoint, body: bytes, prefix: bytes) -> None:
    assert read(endpoint, body).prefix_bytes() == prefix


def test_two_turns_of_a_conversation_begin_alike_and_the_beginning_is_bounded() -> None:
    turns = [USER, {"role": "assistant", "content": "x" * 2 * PREFIX_MAX_BYTES}]

    first = read(Endpoint.CHAT, {"model": "m", "messages": turns[:1]}).prefix_bytes()
    second = read(Endpoint.CHAT, {"model": "m", "messages": turns}).prefix_bytes()

    assert second.startswith(first.removesuffix(b"]"))
    assert len(second) == PREFIX_MAX_BYTES
