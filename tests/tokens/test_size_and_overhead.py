"""What a conversation weighs, and what a template adds to it."""

from pathlib import Path
from typing import Any

import pytest

from router.request import ChatPrompt
from router.tokens.limits import TextLimits, TextSize, size_of
from router.tokens.overhead import ChatOverhead, measure_overhead
from router.tokens.plain import PlainBounds
from router.tokens.size import WALK_NODES_MAX, chat_size
from tests.tokens.model_folder import loaded_model
from tests.tokens.varied_chats import chat_prompt, varied_chats

PIXELS = "data:image/png;base64," + "A" * 100_000


def test_a_plain_chat_is_plain_and_weighs_its_texts() -> None:
    size = chat_size(ChatPrompt([{"role": "system", "content": "abc"}, {"role": "user", "content": "  déf "}]))

    assert size.is_plain
    assert size.text_bytes == 3 + 7
    assert size.solid_bytes == 4
    assert size.messages == 2


@pytest.mark.parametrize(
    "chat",
    [
        ChatPrompt([{"role": "user", "content": "x"}], tools=[{"type": "function", "function": {"name": "f"}}]),
        ChatPrompt([{"role": "user", "content": "x"}], template_kwargs={"enable_thinking": False}),
        ChatPrompt([{"role": "user", "content": "x"}], chat_template="{{ messages }}"),
        ChatPrompt([{"role": "user", "content": "x"}], has_stored_history=True),
        ChatPrompt([{"role": "assistant", "content": "x"}], continue_final_message=True),
        ChatPrompt([{"role": "user", "content": "x", "name": "ann"}]),
        ChatPrompt([{"role": "tool", "content": "x"}]),
        ChatPrompt([]),
    ],
)
def test_anything_more_is_not_plain(chat: ChatPrompt) -> None:
    assert not chat_size(chat).is_plain


def test_pictures_are_counted_and_their_bytes_are_not_text() -> None:
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": PIXELS}},
        {"type": "input_image", "image_url": PIXELS},
    ]

    size = chat_size(ChatPrompt([{"role": "user", "content": parts}], bytes_total=2 * len(PIXELS)))

    assert size.media == 2
    assert size.estimate_bytes < 500


def test_forty_tool_schemas_weigh_about_their_json() -> None:
    tool = {"type": "function", "function": {"name": "f" * 50, "description": "d" * 900}}

    size = chat_size(ChatPrompt([{"role": "user", "content": "x"}], tools=[tool] * 40))

    assert 40 * 950 < size.estimate_bytes < 40 * 1200


def test_the_look_at_a_prompt_is_bounded_and_its_json_size_stands_in() -> None:
    schema = {"enum": list(range(10 * WALK_NODES_MAX))}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]

    size = chat_size(ChatPrompt([{"role": "user", "content": "x"}], tools=tools, bytes_total=1_200_000))
    crowd = chat_size(ChatPrompt([{"role": "user", "content": "x"}] * (WALK_NODES_MAX + 1), bytes_total=900_000))

    assert size.estimate_bytes >= 1_200_000
    assert crowd.estimate_bytes >= 900_000
    assert not crowd.is_plain


def test_nesting_of_any_depth_is_walked_without_recursion() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}

    size = chat_size(ChatPrompt([{"role": "user", "content": "x"}], tools=[deep], bytes_total=600_000))

    assert size.estimate_bytes >= 600_000


def test_odd_messages_weigh_something_and_do_not_raise() -> None:
    messages: list[Any] = ["text", 5, None, {"role": 7}, {"role": "user", "content": [1, "a", {"text": "b"}]}]

    assert chat_size(ChatPrompt(messages)).estimate_bytes > 0


@pytest.mark.parametrize("name", ["simple", "tools", "strict", "parts"])
def test_measured_overhead_covers_every_varied_plain_chat(model_folders: dict[str, Path], name: str) -> None:
    tokenizer = loaded_model(model_folders[name])
    assert tokenizer.overhead is not None
    chats = [chat for body in varied_chats() if chat_size(chat := chat_prompt(body)).is_plain]

    checked = 0
    for chat in chats:
        try:
            rendered = tokenizer.render(chat)
        except Exception:  # noqa: BLE001 - the strict template raises its own kind of error, which is not the subject
            continue
        size = chat_size(chat)
        assert size_of(rendered).bytes <= size.text_bytes + tokenizer.overhead.of(size.messages).bytes
        checked += 1

    assert checked >= 20


@pytest.mark.parametrize(("stretch", "shrink", "prefix"), [(1, 1, 0), (3, 9, 0), (2, 1, 1)])
@pytest.mark.parametrize("longest_token_bytes", [0, 7])
@pytest.mark.parametrize("content", ["", "plain text", " wide: 人人 "])
def test_a_plain_chats_bounds_are_those_of_its_texts_and_the_templates_words_together(
    stretch: int, shrink: int, prefix: int, longest_token_bytes: int, content: str
) -> None:
    limits = TextLimits(True, stretch, shrink, prefix, prefix == 1, longest_token_bytes, special_tokens=0)
    overhead = ChatOverhead(TextSize(10, 3), TextSize(5, 2))
    chat = ChatPrompt([{"role": "assistant", "content": "é"}, {"role": "user", "content": content}])

    lower, upper = PlainBounds(limits, overhead).of(chat_size(chat))

    assert lower == limits.lower(size_of(content.strip()))
    assert upper == limits.upper(size_of("é") + size_of(content) + overhead.of(2))


@pytest.mark.parametrize(
    "render",
    [
        lambda chat: "".join(2 * m["content"] for m in chat.messages),
        lambda chat: chat.messages[-1]["content"],
        lambda chat: 1 / 0,
    ],
)
def test_a_template_that_repeats_drops_or_refuses_has_no_measure(render: Any) -> None:
    assert measure_overhead(render) is None
