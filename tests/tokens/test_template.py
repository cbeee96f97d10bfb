"""What a template is given, and what it renders."""

from pathlib import Path
from typing import Any

import pytest

from router.request import ChatPrompt
from router.tokens.content_format import ContentFormat
from router.tokens.conversation import CannotRender, engine_messages, engine_tools
from tests.tokens.model_folder import loaded_model

USER = {"role": "user", "content": "hi"}


def _one(message: dict[str, Any], content_format: ContentFormat = ContentFormat.STRING) -> dict[str, Any]:
    return engine_messages([message], content_format)[0]


def test_parts_are_joined_by_lines_where_the_template_takes_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]

    assert _one({"role": "user", "content": parts})["content"] == "a\nb"


def test_parts_stay_parts_where_the_template_takes_lists() -> None:
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]

    shown = _one({"role": "user", "content": parts}, ContentFormat.OPENAI)["content"]

    assert shown == [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "image"}]


def test_null_content_is_empty() -> None:
    assert _one({"role": "assistant", "content": None}) == {"role": "assistant", "content": ""}
    assert _one({"role": "assistant"}, ContentFormat.OPENAI) == {"role": "assistant", "content": []}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"b":1,"a":2}', {"b": 1, "a": 2}), ("", {}), ("[1]", {}), ("not json", {}), ({"q": 1}, {"q": 1}), (None, {})],
)
def test_arguments_of_tool_calls_become_objects(arguments: object, expected: dict[str, Any]) -> None:
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": arguments}}

    shown = _one({"role": "assistant", "tool_calls": [call]})["tool_calls"]

    assert shown == [{"id": "c1", "function": {"arguments": expected, "name": "f"}, "type": "function"}]
    assert call["function"] == {"name": "f", "arguments": arguments}


def test_empty_tool_calls_are_dropped_and_reasoning_has_two_names() -> None:
    shown = _one({"role": "assistant", "content": "x", "tool_calls": [], "reasoning_content": "hm"})

    assert shown == {"role": "assistant", "content": "x", "reasoning": "hm", "reasoning_content": "hm"}


def test_a_tool_result_in_parts_is_one_text_even_for_list_templates() -> None:
    message = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}] * 2}

    assert _one(message, ContentFormat.OPENAI) == {"role": "tool", "content": "a\na", "tool_call_id": "c"}


def test_a_tool_reference_in_a_result_keeps_the_result_a_list() -> None:
    message = {"role": "tool", "tool_call_id": "c", "content": [{"type": "tool_reference", "name": "t"}]}

    assert _one(message, ContentFormat.OPENAI)["content"] == [{"type": "tool_reference", "name": "t"}]


def test_the_billing_line_of_a_system_prompt_is_taken_out() -> None:
    assert _one({"role": "system", "content": "x-anthropic-billing-header: 1\nrest"})["content"] == "rest"
    assert _one({"role": "system", "content": "x-anthropic-billing-header: 1"})["content"] == ""


def test_tools_keep_known_fields_in_the_engines_order() -> None:
    tool = {"function": {"parameters": {}, "name": "f", "strict": True, "odd": 1}, "note": 2, "type": "function"}

    shown = engine_tools([tool])

    assert shown is not None
    assert list(shown[0]) == ["type", "function"]
    assert list(shown[0]["function"]) == ["name", "description", "parameters", "strict"]
    assert engine_tools([]) is None


def test_deferred_loading_reaches_the_function() -> None:
    shown = engine_tools([{"type": "function", "function": {"name": "f"}, "defer_loading": True}])

    assert shown is not None
    assert shown[0]["defer_loading"] is True
    assert shown[0]["function"]["defer_loading"] is True


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"type": "hologram"}]},
        {"role": "assistant", "tool_calls": ["x"]},
        {"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]},
    ],
)
def test_what_the_engine_refuses_is_not_rendered(message: dict[str, Any]) -> None:
    with pytest.raises(CannotRender):
        _one(message)


def test_options_reach_the_template_and_unknown_ones_do_not_fail(model_folders: dict[str, Path]) -> None:
    tokenizer = loaded_model(model_folders["tools"])
    options = {"enable_thinking": False, "style": "[brief]", "unheard_of": 1, "documents": None}

    text = tokenizer.render(ChatPrompt([USER], template_kwargs=options))

    assert text.endswith("<|assistant|>\n<think>\n\n</think>\n[brief]")


def test_effort_none_switches_thinking_off(model_folders: dict[str, Path]) -> None:
    tokenizer = loaded_model(model_folders["tools"])

    off = tokenizer.render(ChatPrompt([USER], template_kwargs={"reasoning_effort": "none"}))
    on = tokenizer.render(ChatPrompt([USER], template_kwargs={"reasoning_effort": "high"}))

    assert "</think>" in off
    assert "</think>" not in on


def test_a_final_message_is_continued(model_folders: dict[str, Path]) -> None:
    tokenizer = loaded_model(model_folders["simple"])
    messages = [USER, {"role": "assistant", "content": "Once upon"}]

    text = tokenizer.render(ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True))

    assert text.endswith("Once upon")


def test_developer_messages_become_one_system_message_where_the_role_is_unknown(model_folders: dict[str, Path]) -> None:
    tokenizer = loaded_model(model_folders["simple"])
    messages = [{"role": "system", "content": "one"}, USER, {"role": "developer", "content": "two"}]

    text = tokenizer.render(ChatPrompt(messages))

    assert "<|system|>\none\n\ntwo\n<|user|>\nhi\n" in text


@pytest.mark.parametrize("name", ["chat_template", "tokenize"])
def test_options_that_the_engine_refuses_are_refused(model_folders: dict[str, Path], name: str) -> None:
    tokenizer = loaded_model(model_folders["simple"])

    with pytest.raises(CannotRender):
        tokenizer.render(ChatPrompt([USER], template_kwargs={name: "{{ 1 }}"}))


def test_a_clients_own_template_is_never_run(model_folders: dict[str, Path]) -> None:
    tokenizer = loaded_model(model_folders["simple"])

    with pytest.raises(CannotRender):
        tokenizer.render(ChatPrompt([USER], chat_template="{% for i in range(9**9) %}x{% endfor %}"))
