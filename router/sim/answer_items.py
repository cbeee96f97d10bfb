"""The shapes of the two APIs whose streams build items out of named events: `/v1/responses` and `/v1/messages`.

Both answer with one sequence; `n` does not exist there. Field names and order are those of vLLM 0.32.0.
"""

from typing import Any

from router.request import Endpoint
from router.sim.answers import ChatShape, CompletionShape, Said, Shape, Stamp, Usage, event
from router.sim.calls import Call
from router.sim.options import SimServerOptions


class ResponsesShape:
    """`/v1/responses`: numbered events around one output message."""

    def __init__(self, call: Call, stamp: Stamp) -> None:
        self._call = call
        self._stamp = stamp
        self._number = 0
        self._text = ""
        self._finish_reason = "stop"
        self._has_begun = False

    def token(self, index: int, text: str, finish_reason: str | None, usage: Usage) -> list[bytes]:  # noqa: ARG002  one sequence, usage only at the end
        events = [] if self._has_begun else self._introduction()
        self._has_begun = True
        self._text += text
        self._finish_reason = finish_reason or self._finish_reason
        place = {"content_index": 0, "item_id": self._stamp.item_id, "output_index": 0}
        return [*events, self._event("response.output_text.delta", place | {"delta": text, "logprobs": []})]

    def closing(self, usage: Usage) -> list[bytes]:
        item_id = self._stamp.item_id
        place = {"content_index": 0, "item_id": item_id, "output_index": 0}
        said = Said(self._text, self._finish_reason)
        return [
            self._event("response.output_text.done", place | {"logprobs": [], "text": self._text}),
            self._event("response.content_part.done", place | {"part": self._part(self._text, None)}),
            self._event("response.output_item.done", {"item": self._item(said), "output_index": 0}),
            self._event("response.completed", {"response": self.whole([said], usage)}),
        ]

    def whole(self, said: list[Said], usage: Usage) -> dict[str, Any]:
        (only,) = said
        is_cut = only.finish_reason == "length"
        status = "incomplete" if is_cut else ("completed" if only.finish_reason == "stop" else "cancelled")
        details = {"reason": "max_output_tokens"} if is_cut else None
        return self._response(status, details, [self._item(only)], usage)

    def _introduction(self) -> list[bytes]:
        begun = self._response("in_progress", None, [], None)
        item: dict[str, Any] = {"id": self._stamp.item_id, "content": [], "role": "assistant", "status": "in_progress"}
        item |= {"type": "message", "phase": None}
        place = {"content_index": 0, "item_id": self._stamp.item_id, "output_index": 0}
        return [
            self._event("response.created", {"response": begun}),
            self._event("response.in_progress", {"response": begun}),
            self._event("response.output_item.added", {"item": item, "output_index": 0}),
            self._event("response.content_part.added", place | {"part": self._part("", [])}),
        ]

    def _event(self, kind: str, content: dict[str, Any]) -> bytes:
        numbered = event(content | {"sequence_number": self._number, "type": kind}, kind)
        self._number += 1
        return numbered

    def _part(self, text: str, logprobs: list[Any] | None) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    def _item(self, said: Said) -> dict[str, Any]:
        return {
            "id": self._stamp.item_id,
            "content": [self._part(said.text, None)],
            "role": "assistant",
            "status": "completed",
            "type": "message",
            "phase": None,
        }

    def _response(
        self, status: str, incomplete: dict[str, str] | None, output: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        fields = self._call.fields
        return {
            "id": self._stamp.id,
            "created_at": self._stamp.created_unix_s,
            "incomplete_details": incomplete,
            "instructions": fields.get("instructions"),
            "metadata": fields.get("metadata"),
            "model": self._call.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": fields.get("temperature", 1.0),
            "tool_choice": "none",
            "tools": [],
            "top_p": fields.get("top_p", 1.0),
            "background": False,
            "max_output_tokens": self._call.limits_tokens[0],
            "max_tool_calls": None,
            "previous_response_id": fields.get("previous_response_id"),
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": None if usage is None else _responses_usage(usage),
            "user": None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }


def _responses_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": 0,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


#: vLLM's finish reasons in Anthropic's words.
_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessagesShape:
    """`/v1/messages`: Anthropic's events around one text block; no `[DONE]`."""

    def __init__(self, call: Call, stamp: Stamp) -> None:
        self._call = call
        self._stamp = stamp
        self._finish_reason = "stop"
        self._has_begun = False

    def token(self, index: int, text: str, finish_reason: str | None, usage: Usage) -> list[bytes]:  # noqa: ARG002  one sequence
        events: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            message = self._message([], None) | {"stop_sequence": None}
            message["usage"] = {"input_tokens": usage.prompt_tokens, "output_tokens": 0}
            events.append(_named("message_start", {"message": message}))
            events.append(_named("content_block_start", {"content_block": {"type": "text", "text": ""}, "index": 0}))
        self._finish_reason = finish_reason or self._finish_reason
        if text:
            delta = {"type": "text_delta", "text": text}
            events.append(_named("content_block_delta", {"delta": delta, "index": 0}))
        return events

    def closing(self, usage: Usage) -> list[bytes]:
        reason = _STOP_REASONS.get(self._finish_reason, self._finish_reason)
        counted = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
        last = {"delta": {"stop_reason": reason, "stop_sequence": None}, "usage": counted}
        return [
            _named("content_block_stop", {"index": 0}),
            _named("message_delta", last),
            _named("message_stop", {}),
        ]

    def whole(self, said: list[Said], usage: Usage) -> dict[str, Any]:
        (only,) = said
        reason = _STOP_REASONS.get(only.finish_reason, only.finish_reason)
        counted = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
        return self._message([{"type": "text", "text": only.text}], reason) | {"usage": counted}

    def _message(self, content: list[dict[str, str]], stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": self._stamp.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._call.model,
            "stop_reason": stop_reason,
        }


def _named(kind: str, content: dict[str, Any]) -> bytes:
    return event({"type": kind} | content, kind)


def shape_of(call: Call, stamp: Stamp, options: SimServerOptions) -> Shape:
    """The shape that belongs to the call's API."""
    if call.endpoint is Endpoint.CHAT:
        return ChatShape(call, stamp, options)
    if call.endpoint is Endpoint.COMPLETIONS:
        return CompletionShape(call, stamp, options)
    if call.endpoint is Endpoint.RESPONSES:
        return ResponsesShape(call, stamp)
    assert call.endpoint is Endpoint.MESSAGES, call.endpoint
    return MessagesShape(call, stamp)
