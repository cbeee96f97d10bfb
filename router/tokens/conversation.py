"""Turns a client's messages and tools into what a chat template is given, the way vLLM does it.

The engine rebuilds each message from the few fields it knows, joins or keeps the parts of its content as the template
wants them, and parses the arguments of earlier tool calls. Source: vLLM 0.32, `vllm/renderers/chat_utils.py`,
`vllm/entrypoints/openai/chat_completion/protocol.py`. The client's objects are never changed.

Media are not text: a part that holds an image, audio or video is counted, and the placeholder that a multimodal
model's processor would put in its place is left to the rule of so many tokens each.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.tokens.content_format import ContentFormat

Message = dict[str, Any]

_TEXT_FIELD = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
#: Part types that carry media, and what the template is told in the list form.
_MEDIA_TYPE = {
    "image_url": "image",
    "input_image": "image",
    "image_embeds": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
    "file": "file",
}
#: Fields of a content part that the engine reads itself; it hands all others on to the template.
_KNOWN_PART_FIELDS = frozenset(
    {"audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil"}
    | {"image_url", "input_audio", "name", "prompt_cache_breakpoint", "refusal", "text"}
    | {"thinking", "type", "uuid", "video_embeds", "video_url"}
)
#: A line that one client puts into system prompts and the engine takes out.
_BILLING_HEADER = "x-anthropic-billing-header"


class CannotRender(Exception):
    """The conversation is not one the engine would take, or the template refuses it."""


def media_kind(part: Mapping[str, Any]) -> str | None:
    """What medium a content part carries: `image`, `audio`, `video`, `file`, or None for text."""
    kind = part.get("type")
    if isinstance(kind, str):
        return _MEDIA_TYPE.get(kind)
    return next((medium for name, medium in _MEDIA_TYPE.items() if name in part), None)


def engine_messages(messages: Sequence[Mapping[str, Any]], content_format: ContentFormat) -> list[Message]:
    """The conversation as the template sees it.

    Raises: CannotRender for what the engine would answer with 400.
    """
    return [_message(message, content_format) for message in messages]


def engine_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tool definitions as the template sees them: known fields only, in the engine's order, None for absent ones.

    Raises: CannotRender for what the engine would answer with 400.
    """
    if not tools:
        return None
    return [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise CannotRender("a tool without a function name")
    defer = tool.get("defer_loading")
    known = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        known["strict"] = function["strict"]
    function_defer = function.get("defer_loading") if function.get("defer_loading") is not None else defer
    if function_defer is not None:
        known["defer_loading"] = function_defer
    dumped: dict[str, Any] = {"type": "function", "function": known}
    if defer is not None:
        dumped["defer_loading"] = defer
    return dumped


def _message(message: Mapping[str, Any], content_format: ContentFormat) -> Message:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise CannotRender("a message without a role")
    parts = _parts(message.get("content"))
    if role == "system":
        parts = _without_billing_header(parts)
    rendered: Message = {"role": role}
    if content_format is ContentFormat.OPENAI:
        rendered["content"] = [shown for part in parts if (shown := _part_as_dict(part)) is not None]
    else:
        # An empty part leaves no line behind.
        rendered["content"] = "\n".join(text for part in parts if (text := _part_as_text(part)))
    if role == "assistant":
        _add_assistant_fields(rendered, message)
    elif role == "tool":
        if "tool_call_id" in message:
            rendered["tool_call_id"] = message["tool_call_id"]
        rendered["content"] = _tool_result(rendered["content"])
    elif role == "developer":
        rendered["tools"] = message.get("tools")
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            rendered[name] = message[name]
    return rendered


def _parts(content: object) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list | tuple):
        return list(content)
    raise CannotRender("content that is neither text nor a list")


def _part_text(part: Mapping[str, Any]) -> str | None:
    """The text of a text part; None where it is absent, which the engine skips."""
    kind = part.get("type")
    field = _TEXT_FIELD.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise CannotRender(f"a content part of type {str(kind)[:40]!r}")
    text = part.get(field)
    if text is not None and not isinstance(text, str):
        raise CannotRender("a text part without text")
    return text


def _part_as_text(part: object) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise CannotRender("a content part that is not an object")
    if media_kind(part) is not None:
        return None
    if part.get("type") == "tool_reference":
        return str(part.get("name"))
    return _part_text(part)


def _part_as_dict(part: object) -> dict[str, Any] | None:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise CannotRender("a content part that is not an object")
    kind = media_kind(part)
    if kind is not None:
        return {"type": kind} | _extra_fields(part)
    if part.get("type") == "tool_reference":
        return {"type": "tool_reference", "name": part.get("name")}
    text = _part_text(part)
    return None if text is None else {"type": "text", "text": text} | _extra_fields(part)


def _extra_fields(part: Mapping[str, Any]) -> dict[str, Any]:
    """What the client added to a part beyond the fields the engine knows."""
    return {name: value for name, value in part.items() if name not in _KNOWN_PART_FIELDS}


def _tool_result(content: object) -> object:
    """A tool's answer as one string, unless something else than text is in it: most templates take only that."""
    if not isinstance(content, list) or any(part.get("type") != "text" for part in content):
        return content
    return "\n".join(part["text"] for part in content)


def _without_billing_header(parts: list[Any]) -> list[Any]:
    kept = []
    for part in parts:
        is_text_part = isinstance(part, Mapping) and part.get("type") == "text"
        text = part.get("text") if is_text_part else part
        if not (isinstance(text, str) and text.startswith(_BILLING_HEADER)):
            kept.append(part)
            continue
        rest = text.partition("\n")[2]
        if rest:
            kept.append({**part, "text": rest} if is_text_part else rest)
    return kept


def _add_assistant_fields(rendered: Message, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list | tuple):
            raise CannotRender("tool_calls that are not a list")
        rendered["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        rendered["reasoning"] = rendered["reasoning_content"] = reasoning


def _tool_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise CannotRender("a tool call without a function")
    if call.get("type", "function") != "function":
        raise CannotRender("a tool call that is not a function's")
    shown = {"arguments": _arguments(function.get("arguments")), "name": function.get("name")}
    return _known_first(call, {"id": call.get("id"), "function": _known_first(function, shown), "type": "function"})


def _known_first(given: Mapping[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The known fields in the engine's order, then whatever else the client sent."""
    return known | {name: value for name, value in given.items() if name not in known}


def _arguments(arguments: object) -> Mapping[str, Any]:
    """Arguments as an object; what is no JSON object becomes an empty one."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return {}
    return arguments if isinstance(arguments, Mapping) else {}
