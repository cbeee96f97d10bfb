"""Anthropic and Responses bodies as the chat the engine makes of them, for counting only.

The engine gets the client's own bytes; these conversions exist so that its prompt can be counted here. A part that is
not known is reported as such (`complete` is False) and the count is then no longer called exact.
Source: what vLLM 0.32 was seen to do on /v1/messages and /v1/responses (facts: system blocks joined without a space,
tool results as `tool` messages, instructions as a leading system message, one assistant message per turn).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Claude Code sends its billing header as a system block; the engine leaves it out of the prompt.
_BILLING_PREFIX = "x-anthropic-billing-header"


@dataclass(slots=True)
class Converted:
    """Chat messages and tools in OpenAI's form; `complete` is False where a part could not be represented."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    complete: bool = True


def from_anthropic(system: Any, messages: Sequence[Mapping[str, Any]], tools: Any) -> Converted:
    """A body of /v1/messages."""
    chat = Converted()
    system_text = _anthropic_text(system)
    if system_text:
        chat.messages.append({"role": "system", "content": system_text})
    for message in messages:
        role = message.get("role")
        content = message.get("content")
        if role == "system":
            text = _anthropic_text(content)
            if text:
                chat.messages.append({"role": "system", "content": text})
        elif isinstance(content, str):
            chat.messages.append({"role": role, "content": content})
        else:
            _anthropic_blocks(chat, role, _mappings(content))
    if isinstance(tools, list):
        chat.tools = [_anthropic_tool(tool) for tool in _mappings(tools)]
    return chat


def from_responses(instructions: Any, given: Any, tools: Any) -> Converted:
    """A body of /v1/responses. `given` is its `input`: a string or a list of items."""
    chat = Converted()
    if isinstance(instructions, str) and instructions:
        chat.messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        chat.messages.append({"role": "user", "content": given})
    else:
        for item in _mappings(given):
            _responses_item(chat, item)
    if isinstance(tools, list):
        chat.tools = [_responses_tool(tool) for tool in _mappings(tools) if tool.get("type") == "function"]
        chat.complete = chat.complete and len(chat.tools) == len(tools)
    return chat


def _anthropic_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    texts = [block.get("text") for block in _mappings(value) if block.get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(_BILLING_PREFIX))


def _anthropic_blocks(chat: Converted, role: Any, blocks: Iterable[Mapping[str, Any]]) -> None:
    """One message of blocks; tool results come before it as messages of their own."""
    message: dict[str, Any] = {"role": role}
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            parts.append({"type": "image_url", "image_url": {"url": ""}})
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block.get("name") or "", "arguments": arguments}
            calls.append({"id": block.get("id") or "call_0", "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            _anthropic_tool_result(chat, block)
        elif kind != "redacted_thinking":
            chat.complete = False
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if len(parts) == 1 and parts[0]["type"] == "text":
        message["content"] = parts[0]["text"]
    elif parts:
        message["content"] = parts
    if role != "user" or "content" in message:
        chat.messages.append(message)


def _anthropic_tool_result(chat: Converted, block: Mapping[str, Any]) -> None:
    content = block.get("content")
    images = 0
    if not isinstance(content, str):
        texts: list[str] = []
        for item in _mappings(content):
            if item.get("type") == "text":
                texts.append(str(item.get("text") or ""))
            elif item.get("type") == "image":
                images += 1
            else:
                chat.complete = False
        content = "\n".join(texts)
    chat.messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content})
    if images:
        parts = [{"type": "image_url", "image_url": {"url": ""}} for _ in range(images)]
        chat.messages.append({"role": "user", "content": parts})


def _anthropic_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.get("name")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if tool.get("input_schema") is not None:
        function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


def _responses_item(chat: Converted, item: Mapping[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        if not isinstance(content, str):
            parts = [_responses_part(chat, part) for part in _mappings(content)]
            content = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
        chat.messages.append({"role": item.get("role", "user"), "content": content})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if chat.messages and chat.messages[-1]["role"] == "assistant":
            chat.messages[-1].setdefault("tool_calls", []).append(call)
        else:
            chat.messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        chat.complete = chat.complete and isinstance(output, str)
        chat.messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    else:
        chat.complete = False


def _responses_part(chat: Converted, part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": str(part.get("text") or "")}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": ""}}
    chat.complete = False
    return {"type": "text", "text": json.dumps(part, ensure_ascii=False)}


def _responses_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _mappings(value: Any) -> Iterable[Mapping[str, Any]]:
    """The objects of a JSON list; whatever else stands there is the engine's to refuse."""
    return (item for item in value if isinstance(item, Mapping)) if isinstance(value, list) else ()
