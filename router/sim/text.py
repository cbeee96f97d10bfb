"""Text for an engine that has none: a stated rule for prompt tokens, and words for the output.

The default tokenizer takes `bytes_per_token` UTF-8 bytes of the rendered text for one token, the last one perhaps
shorter. It is deterministic and reversible, and no model's. A real one can be put in its place (`SimTokenizer`).
Its output words are exactly one token long, so a conversation that quotes an answer counts it as it was.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_CONSONANTS = "bdfgklmnprst"
_VOWELS = "aeiou"


class SimTokenizer(Protocol):
    """What the simulated server asks of a tokenizer."""

    def count(self, text: str) -> int:
        """Tokens of `text`, without encoding it where that is cheaper."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> str:
        """The conversation as the model would see it."""
        ...

    def word(self, index: int) -> str:
        """The text of an output token; `index` is any number."""
        ...


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """One token per `bytes_per_token` UTF-8 bytes, at least 1. The id of a token holds its bytes and their number."""

    bytes_per_token: int = 4

    def count(self, text: str) -> int:
        size_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return -(-size_bytes // self.bytes_per_token)

    def encode(self, text: str) -> list[int]:
        raw = text.encode("utf-8", "surrogatepass")
        step = self.bytes_per_token
        return [int.from_bytes(b"\x01" + raw[start : start + step], "big") for start in range(0, len(raw), step)]

    def decode(self, token_ids: Sequence[int]) -> str:
        raw = b"".join(each.to_bytes((each.bit_length() + 7) // 8, "big")[1:] for each in token_ids)
        return raw.decode("utf-8", "replace")

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> str:
        parts = [f"<|tools|>{json.dumps(tools, ensure_ascii=False)}<|end|>\n"] if tools else []
        parts += [
            f"<|{message.get('role', 'user')}|>{text_of(message.get('content'))}<|end|>\n" for message in messages
        ]
        return "".join(parts) + "<|assistant|>"

    def word(self, index: int) -> str:
        letters = "".join(
            (_CONSONANTS if place % 2 == 0 else _VOWELS)[(index // (7**place) + place) % (12 if place % 2 == 0 else 5)]
            for place in range(max(1, self.bytes_per_token - 1))
        )
        return letters if self.bytes_per_token == 1 else " " + letters


def text_of(content: object) -> str:
    """The text in a message's content: a string, or parts of which those with `text` count."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (
            part if isinstance(part, str) else part.get("text", "") for part in content if isinstance(part, str | dict)
        )
        return "".join(text for text in texts if isinstance(text, str))
    return ""
