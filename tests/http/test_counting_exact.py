"""Counts of a model with a Hugging Face tokenizer and chat template, as its clients see them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.http.setting import model_config
from tests.http.stack import Stack, fresh, stack_of
from tests.http.stage import Stage
from tests.tokens.model_folder import STRICT, TOOLS, make_model_folder

SPECIAL = "explain <|endoftext|> and <｜end▁of▁sentence｜> in this file"
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "d" * 900, "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "tools", TOOLS, small=True)


@pytest.fixture(scope="module")
def exact_stack(stage: Stage, folder: Path) -> Stack:
    tokenizer = {"kind": "huggingface", "path": str(folder), "exact": "always"}
    return stage.start(stack_of(models=[model_config(tokenizer=tokenizer)]))


@pytest.fixture
def exact(stage: Stage, exact_stack: Stack) -> Iterator[Stack]:
    yield exact_stack
    stage.run(exact_stack.check_at_rest())


async def chat(stack: Stack, messages: list[dict[str, Any]], **fields: Any) -> tuple[int, str]:
    body = {"model": "llama", "messages": messages, "max_tokens": 2, **fields}
    answer = await stack.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert json.loads(stack.sent_for(answer).body) == body
    return int(answer.headers["x-router-prompt-tokens"]), answer.headers["x-router-prompt-tokens-exact"]


def said(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def test_quoted_special_tokens_are_counted_as_the_models_own_tokenizer_counts_them(
    exact: Stack, folder: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rendered = f"<｜begin▁of▁sentence｜><|user|>\n{SPECIAL}\n<|assistant|>\n"

    counted = await chat(exact, said(SPECIAL))

    assert counted == (len(tokenizer.encode(rendered, add_special_tokens=False).ids), "true")


async def test_content_in_parts_is_counted_like_the_same_content_in_one_string(exact: Stack) -> None:
    whole, _ = await chat(exact, said("One and a half.\nTwo and a half."))

    parts, _ = await chat(
        exact, said([{"type": "text", "text": "One and a half."}, {"type": "text", "text": "Two and a half."}])
    )

    assert abs(parts - whole) <= 3


async def test_tools_weigh_what_their_schemas_weigh(exact: Stack) -> None:
    bare, _ = await chat(exact, said("Hi."))

    with_tools, is_exact = await chat(exact, said("Hi."), tools=[TOOL] * 3, tool_choice="none")

    # One token a byte with this tokenizer.
    schemas = 3 * len(json.dumps(TOOL))
    assert is_exact == "true"
    assert schemas * 0.95 <= with_tools - bare <= schemas * 1.1


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ({"add_generation_prompt": False}, -len("<|assistant|>\n")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, len("<think>\n\n</think>\n")),
        ({"chat_template_kwargs": {"style": "in short"}}, len("in short")),
    ],
)
async def test_template_options_are_used_in_the_count(exact: Stack, fields: dict[str, Any], difference: int) -> None:
    plain, _ = await chat(exact, said("Hi."))

    with_options, _ = await chat(exact, said("Hi."), **fields)

    assert with_options - plain == difference


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"content": "no role"}],
        [{"role": "user", "content": {"odd": 1}}],
        [{"role": "user", "content": [{"type": "made_up"}]}],
        [{"role": 5, "content": "x"}],
    ],
)
async def test_what_the_template_cannot_take_is_estimated_and_left_to_the_engine(
    exact: Stack, messages: list[dict[str, Any]]
) -> None:
    answer = await exact.post("/v1/chat/completions", {"model": "llama", "messages": messages, "max_tokens": 2})

    assert answer.status_code in (200, 400)
    assert exact.sent_for(answer)


async def test_two_user_turns_in_a_row_are_the_engines_to_judge_where_the_template_wants_turns(tmp_path: Path) -> None:
    tokenizer = {"kind": "huggingface", "path": str(make_model_folder(tmp_path / "strict", STRICT, small=True))}

    async with fresh(models=[model_config(tokenizer={**tokenizer, "exact": "always"})]) as stack:
        _, turns = await chat(stack, said("One."))
        tokens, twice = await chat(stack, [*said("One."), *said("Two.")])

        assert (turns, twice) == ("true", "false")
        assert tokens > 0


async def test_a_prompt_far_over_every_limit_is_refused_by_its_size_without_being_tokenized(exact: Stack) -> None:
    (service,) = exact.runtime.state.models
    missed = dict(service.counter.missed)

    answer = await exact.post("/v1/chat/completions", {"model": "llama", "messages": said("x" * 20_000_000)})

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert answer.headers["x-router-prompt-tokens-exact"] == "false"
    assert service.counter.missed == missed
