"""The shapes of vLLM's answers, whole and streamed, for the four generating APIs and for embeddings.

A `Shape` belongs to one call and turns tokens into events; it knows no engine, clock or socket. Field names and order
are those of vLLM 0.32.0. One list item is one complete server-sent event.
"""

import json
from dataclasses import dataclass
from typing import Any, Protocol

from router.sim.calls import Call
from router.sim.options import SimServerOptions

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the whole call."""

    prompt_tokens: int
    completion_tokens: int

    def as_openai(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Said:
    """What one sequence said in the end."""

    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Stamp:
    """What identifies one answer: its id, a second id for items inside it, and its Unix second."""

    id: str
    item_id: str
    created_unix_s: int


class Shape(Protocol):
    """One call's answer."""

    def token(self, index: int, text: str, finish_reason: str | None, usage: Usage) -> list[bytes]:
        """Events for one more token of sequence `index`; its first comes with what introduces it."""
        ...

    def closing(self, usage: Usage) -> list[bytes]:
        """Events after the last token."""
        ...

    def whole(self, said: list[Said], usage: Usage) -> dict[str, Any]:
        """The answer without streaming."""
        ...


def event(content: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    raw = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return (b"" if name is None else b"event: " + name.encode() + b"\n") + b"data: " + raw + b"\n\n"


class ChatShape:
    """`/v1/chat/completions`: a role chunk with the first token, the finish reason on the last one."""

    def __init__(self, call: Call, stamp: Stamp, options: SimServerOptions) -> None:
        self._call = call
        self._stamp = stamp
        self._fingerprint = fingerprint(options)
        self._begun: set[int] = set()

    def token(self, index: int, text: str, finish_reason: str | None, usage: Usage) -> list[bytes]:
        events: list[bytes] = []
        if index not in self._begun:
            self._begun.add(index)
            first: dict[str, Any] = {"index": index, "delta": {"role": "assistant", "content": ""}}
            first |= {"logprobs": None, "finish_reason": None}
            events.append(self._chunk([first], usage, {"prompt_token_ids": None, "prompt_text": None}))
        choice: dict[str, Any] = {"index": index, "delta": {"content": text}, "logprobs": None}
        choice["finish_reason"] = finish_reason
        if finish_reason is not None:
            choice["stop_reason"] = None
        choice["token_ids"] = None
        is_last = finish_reason is not None and not self._call.include_usage
        extra = {"system_fingerprint": self._fingerprint} if is_last else {}
        return [*events, self._chunk([choice], usage, extra)]

    def closing(self, usage: Usage) -> list[bytes]:
        if not self._call.include_usage:
            return [DONE]
        last = self._head() | {"choices": [], "usage": usage.as_openai(), "system_fingerprint": self._fingerprint}
        return [event(last), DONE]

    def whole(self, said: list[Said], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": each.text,
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": each.finish_reason,
                "stop_reason": None,
                "token_ids": None,
                "routed_experts": None,
            }
            for index, each in enumerate(said)
        ]
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": usage.as_openai() | {"prompt_tokens_details": None, "completion_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _head(self, kind: str = "chat.completion.chunk") -> dict[str, Any]:
        stamp = self._stamp
        return {"id": stamp.id, "object": kind, "created": stamp.created_unix_s, "model": self._call.model}

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage, extra: dict[str, Any]) -> bytes:
        running = {"usage": usage.as_openai()} if self._call.continuous_usage else {}
        return event({**self._head(), "choices": choices, **running, **extra})


class CompletionShape:
    """`/v1/completions`: plain text choices, `echo` puts the prompt in front."""

    def __init__(self, call: Call, stamp: Stamp, options: SimServerOptions) -> None:
        self._call = call
        self._stamp = stamp
        self._fingerprint = fingerprint(options)
        self._begun: set[int] = set()

    def token(self, index: int, text: str, finish_reason: str | None, usage: Usage) -> list[bytes]:
        if index not in self._begun:
            self._begun.add(index)
            text = self._echoed(index) + text
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        running = {"usage": usage.as_openai()} if self._call.continuous_usage else {}
        return [event({**self._head(), "choices": [choice], **running})]

    def closing(self, usage: Usage) -> list[bytes]:
        if not self._call.include_usage:
            return [DONE]
        last = {"choices": [], "usage": usage.as_openai(), "system_fingerprint": self._fingerprint}
        return [event(self._head() | last), DONE]

    def whole(self, said: list[Said], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": self._echoed(index) + each.text,
                "logprobs": None,
                "finish_reason": each.finish_reason,
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "routed_experts": None,
            }
            for index, each in enumerate(said)
        ]
        return {
            **self._head(),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": usage.as_openai() | {"prompt_tokens_details": None, "completion_tokens_details": None},
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _head(self) -> dict[str, Any]:
        stamp = self._stamp
        return {"id": stamp.id, "object": "text_completion", "created": stamp.created_unix_s, "model": self._call.model}

    def _echoed(self, index: int) -> str:
        return (self._call.prompts[index // self._call.n].text or "") if self._call.echo else ""


def fingerprint(options: SimServerOptions) -> str:
    """`vllm-VERSION-HASH8`, the hash from the seed."""
    return f"vllm-{options.version}-{options.seed % 2**32:08x}"


def embeddings(call: Call, stamp: Stamp, options: SimServerOptions) -> dict[str, Any]:
    """`/v1/embeddings`: unit vectors whose direction depends on the prompt's length alone."""
    size = options.embedding_dimensions
    items = []
    for index, prompt in enumerate(call.prompts):
        vector = [0.0] * size
        vector[prompt.tokens % size] = 1.0
        items.append({"index": index, "object": "embedding", "embedding": vector})
    usage = Usage(call.prompt_tokens, 0).as_openai() | {"prompt_tokens_details": None}
    return {
        "id": stamp.id,
        "object": "list",
        "created": stamp.created_unix_s,
        "model": call.model,
        "data": items,
        "usage": usage,
    }
