"""Every JSON type in every field of every endpoint: parsing and counting end in a count or in the client's 400."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from router.config.model import TokenizerConfig
from router.errors import ApiError
from router.flow.outgoing import render_body
from router.http.parsing import LIGHT_ENDPOINTS, Incoming, parse
from router.request import Count, Endpoint
from router.tokens.count import build_counter
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
Path_ = tuple[str | int, ...]


def bodies(endpoint: Endpoint) -> list[dict[str, Any]]:
    """Well-formed bodies that have every field the router reads, and the same without the fields all share."""
    return [whole for own in OWN[endpoint] for whole in (SHARED | own, {"model": "llama", "max_tokens": 1} | own)]


def places(value: Any, before: Path_ = ()) -> Iterator[Path_]:
    """Every place in a JSON value, the value itself left out."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield (*before, name)
        yield from places(child, (*before, name))


def put(body: Any, place: Path_, value: Any) -> None:
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


def counting(folder: Path, path: Path | None) -> Callable[[Endpoint, Sequence[dict[str, Any]]], list[Count | int]]:
    """Parses, counts exactly where it can, learns and renders; a body's count, or the status of its refusal."""
    kind = "estimate" if path is None else "huggingface"
    config = TokenizerConfig(kind, path, None, "always", image_tokens=10, timeout_s=60.0)

    async def all_of(endpoint: Endpoint, given: Sequence[dict[str, Any]]) -> list[Count | int]:
        counter = build_counter(config, model="llama")
        ends: list[Count | int] = []
        try:
            for body in given:
                try:
                    request = parse(
                        Incoming("id", endpoint, "/v1/x", "application/json", json.dumps(body).encode(), None)
                    )
                    count = await counter.count(request.prompt, decision_tokens=(1, 100), request_class=request.hint)
                except ApiError as error:
                    ends.append(error.status)
                else:
                    counter.learn(request.prompt, count, 7, request.hint)
                    render_body(request, request.edits)
                    ends.append(count)
        finally:
            await counter.aclose()
        return ends

    return lambda endpoint, given: asyncio.run(all_of(endpoint, given))
