"""Every JSON type in every field of every endpoint: parsing and counting end in a count or in the client's 400."""

import json
import random
import sys
from collections.abc import Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import pytest

from router.config.model import TokenizerConfig
from router.errors import ApiError
from router.flow.outgoing import render_body
from router.http.head import Head
from router.http.parsing import parse
from router.request import Count, Endpoint
from router.tokens.api import PromptCounter
from router.tokens.count import build_counter
from tests.http.scripted import ScriptedEngine
from tests.http.setting import chat_body
from tests.http.stack import Stack
from tests.tokens.model_folder import TOOLS, make_model_folder

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, 1e308, 2**40, 2**70, "", "x", "\u0000", "模"),
    *([], [[]], [None], [1], ["x"], [{}], [1, "x", None, [], {}], [[1], ["x"]], [{"type": "text"}]),
    *({}, {"a": []}, {"type": []}, {"type": "text", "text": {}}, {"role": {}}, {"": {"": [{}]}}),
)

PART_KINDS: tuple[dict[str, Any], ...] = (
    {"type": "text", "text": "a"},
    {"type": "image_url", "image_url": {"url": "data:,"}},
    {"type": "tool_reference", "name": "n"},
)
FUNCTION: dict[str, Any] = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s", "name": "n"},
    {"role": "developer", "content": "d", "tools": []},
    {"role": "user", "content": list(PART_KINDS)},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "r", "reasoning_content": "r"},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}]},
    {"role": "user", "content": "u", "task": "t"},
]
BLOCKS: list[dict[str, Any]] = [
    {"type": "text", "text": "a"},
    {"type": "image", "source": {}},
    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
    {"type": "thinking", "thinking": "t"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
]
ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]},
    {"role": "assistant", "content": "a"},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "o"},
    {"type": "message", "role": "user", "content": [{"type": "input_file", "file_id": "f"}]},
]
SHARED: dict[str, Any] = {
    "model": "llama",
    "stream": True,
    "stream_options": {"include_usage": False, "continuous_usage_stats": True},
    "n": 1,
    "priority": 1,
    "kv_transfer_params": {},
    "service_tier": "flex",
    "chat_template": None,
    "chat_template_kwargs": {"enable_thinking": True, "tools": None},
}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION, "defer_loading": False}]
OWN: dict[Endpoint, tuple[dict[str, Any], ...]] = {
    Endpoint.CHAT: (
        {
            "messages": MESSAGES,
            "tools": CHAT_TOOLS,
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "add_special_tokens": False,
            "documents": [{"title": "t", "text": "x"}],
            "reasoning_effort": "low",
        },
        # Nothing but plain messages, which are weighed by a way of their own.
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": [PART_KINDS[0]]}]},
    ),
    Endpoint.COMPLETIONS: (
        {"prompt": ["a", "b"], "prompt_embeds": None, "max_tokens": 1, "add_special_tokens": True, "best_of": 1},
        {"prompt": [[1, 2], [3]]},
    ),
    Endpoint.RESPONSES: (
        {
            "input": ITEMS,
            "instructions": "i",
            "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {}}],
            "max_output_tokens": 1,
            "previous_response_id": None,
            "background": False,
        },
    ),
    Endpoint.MESSAGES: (
        {
            "messages": [
                {"role": "user", "content": BLOCKS},
                {"role": "assistant", "content": BLOCKS},
                {"role": "user", "content": "u"},
            ],
            "system": [{"type": "text", "text": "s"}],
            "tools": [{"name": "f", "description": "d", "input_schema": {}}],
            "max_tokens": 1,
        },
    ),
    Endpoint.EMBEDDINGS: ({"input": ["a"]}, {"input": [1, 2]}),
    Endpoint.POOLING: ({"messages": [{"role": "user", "content": "u"}]}, {"input": "a"}),
    Endpoint.CLASSIFY: ({"input": "a"},),
    Endpoint.SCORE: ({"text_1": "a", "text_2": ["b", "c"]}, {"queries": ["a"], "documents": ["b"]}),
    Endpoint.RERANK: ({"query": "a", "documents": ["b", "c"]},),
    Endpoint.COUNT_TOKENS: ({"messages": [{"role": "user", "content": "u"}]},),
    Endpoint.TOKENIZE: ({"prompt": "a"},),
    Endpoint.DETOKENIZE: ({"tokens": [1]},),
}
Place = tuple[str | int, ...]


def bodies(endpoint: Endpoint) -> list[dict[str, Any]]:
    """Well-formed bodies that have every field the router reads, and the same without the fields all share."""
    return [whole for own in OWN[endpoint] for whole in (SHARED | own, {"model": "llama", "max_tokens": 1} | own)]


def places(value: Any, before: Place = ()) -> Iterator[Place]:
    """Every place in a JSON value, the value itself left out."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield (*before, name)
        yield from places(child, (*before, name))


def put(body: Any, place: Place, value: Any) -> None:
    for name in place[:-1]:
        body = body[name]
    body[place[-1]] = deepcopy(value)


def single(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    for body in bodies(endpoint):
        for place in places(body):
            for value in ODD:
                odd = deepcopy(body)
                put(odd, place, value)
                yield odd


def several(endpoint: Endpoint, dice: random.Random) -> Iterator[dict[str, Any]]:
    """Bodies with two to five odd values, some of them inside others, and some fields gone."""
    for _ in range(300):
        odd = deepcopy(dice.choice(bodies(endpoint)))
        for _ in range(dice.randint(2, 5)):
            found = list(places(odd))
            if found:
                put(odd, dice.choice(found), dice.choice(ODD))
        for name in dice.sample(sorted(odd), k=min(len(odd), dice.randint(0, 2))):
            del odd[name]
        yield odd


async def walked(counter: PromptCounter, endpoint: Endpoint, body: dict[str, Any]) -> Count | int:
    """The body parsed, counted, learned from and written out again: its count, or the status of its refusal."""
    raw = json.dumps(body).encode()
    try:
        request = parse(endpoint, "/v1/x", Head("id", None, frozenset(), {b"content-type": b"application/json"}), raw)
        count = await counter.count(request.prompt, decision_tokens=(1, 100), request_class=request.hint)
        counter.learn(count, 7, request.hint)
        render_body(request, {**request.edits, "model": "other"})
    except ApiError as error:
        return error.status
    return count


async def ends_of(tokenizer: Path | None, endpoint: Endpoint, given: Iterable[dict[str, Any]]) -> list[Count | int]:
    kind: Literal["estimate", "huggingface"] = "estimate" if tokenizer is None else "huggingface"
    config = TokenizerConfig(kind, tokenizer, None, "always", image_tokens=10, timeout_s=60.0)
    counter = build_counter(config, model="llama")
    try:
        return [await walked(counter, endpoint, body) for body in given]
    finally:
        await counter.aclose()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), TOOLS, small=True)


@pytest.mark.parametrize("endpoint", OWN)
async def test_any_json_in_any_field_ends_in_a_count_or_in_a_400(endpoint: Endpoint) -> None:
    ends = await ends_of(None, endpoint, single(endpoint))

    assert {end for end in ends if isinstance(end, int)} <= {400}
    assert any(isinstance(end, Count) for end in ends)


@pytest.mark.parametrize("endpoint", OWN)
async def test_odd_json_in_several_fields_ends_in_a_count_or_in_a_400(model_folder: Path, endpoint: Endpoint) -> None:
    ends = await ends_of(model_folder, endpoint, several(endpoint, random.Random(endpoint.value)))

    assert {end for end in ends if isinstance(end, int)} <= {400}
    assert any(isinstance(end, Count) for end in ends)


def test_every_endpoint_with_a_json_body_is_among_them() -> None:
    assert set(OWN) == set(Endpoint) - {Endpoint.AUDIO}


#: Endpoint and a body that is read, converted or written anew where the value stands.
DEEP = {
    "a field that is taken out": ("/v1/chat/completions", {**chat_body(), "priority": "%"}),
    "a field beside it": ("/v1/chat/completions", {**chat_body(), "priority": 1, "x": "%"}),
    "stream options": ("/v1/chat/completions", {**chat_body(), "stream": True, "stream_options": {"x": "%"}}),
    "the input of a tool": (
        "/v1/messages",
        {
            "model": "llama",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": "%"}]}],
        },
    ),
    "a part nobody knows": (
        "/v1/responses",
        {"model": "llama", "input": [{"role": "user", "content": [{"type": "new", "x": "%"}]}]},
    ),
}


@pytest.mark.parametrize("where", DEEP)
async def test_json_just_deep_enough_to_be_read_is_never_the_routers_failure(
    raw: tuple[Stack, ScriptedEngine], where: str
) -> None:
    stack, _ = raw
    path, body = DEEP[where]
    template = json.dumps(body)
    left = sys.getrecursionlimit() - 90

    answers = [
        await stack.post(path, template.replace('"%"', '{"a":' * depth + "1" + "}" * depth).encode())
        for depth in range(left, left + 90)
    ]

    assert {answer.status_code for answer in answers} == {200, 400}


@pytest.mark.parametrize("role", [{}, [], [{}], 1, None, True])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/responses", "input"),
        ("/pooling", "messages"),
    ],
)
async def test_a_role_of_any_type_is_the_engines_to_judge(
    raw: tuple[Stack, ScriptedEngine], path: str, field: str, role: Any
) -> None:
    stack, _ = raw

    answer = await stack.post(path, {"model": "llama", "max_tokens": 2, field: [{"role": role, "content": "x"}]})

    assert answer.status_code == 200
