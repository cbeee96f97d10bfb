"""How few and how many tokens a text can come to, told from the tokenizer's own description, before tokenizing.

Rules, each with its reason:
- Every model that `tokenizers` has makes at most one token of a byte (a byte-level alphabet, byte fallback, or one
  character a token), so tokens <= bytes of the *normalized* text. What is left to know is how far the normalizer can
  stretch it: NFC and NFD at most threefold, NFKC and NFKD at most elevenfold, ASCII never. Source: Unicode Technical
  Report 15, "maximum expansion factor" in UTF-8; composing never makes a text longer than its decomposition.
- A prefix space (ByteLevel, Metaspace, Prepend) adds one symbol to each stretch between special tokens.
- A token of byte-level BPE covers at most as many bytes as its longest vocabulary entry, so tokens >= bytes / longest;
  composing can shrink a text at most ninefold before that. Other models may drop or swallow text: no lower bound.
- A normalizer or pre-tokenizer that is not listed here proves nothing, and `is_proven` is False.

It must never know of requests or templates.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers.pre_tokenizers import ByteLevel

#: How much longer the UTF-8 of a non-ASCII text can get, by normalizer. 3/2 is U+023A, two bytes, lower case three.
_STRETCH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "Strip": 1, "StripAccents": 1}
#: Bytes before composing over bytes after: Kelvin sign to K is 3, and three jamo to one syllable is 3; 9 for both.
_NFC_SHRINK = 9
#: Pre-tokenizers that only cut the text (ByteLevel also renames its bytes, one character a byte).
_CUTTERS = frozenset(
    {"ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
    | {"CharDelimiterSplit", "UnicodeScripts", "Metaspace"}
)
_DROPS_NOTHING = frozenset({"ByteLevel", "Digits"})
_METASPACE = "▁"


class TextSize(msgspec.Struct, frozen=True, gc=False):
    """The size of a text. `wide_bytes` bounds from above the bytes that belong to non-ASCII characters."""

    bytes: int
    wide_bytes: int

    def __add__(self, other: "TextSize") -> "TextSize":
        return TextSize(self.bytes + other.bytes, self.wide_bytes + other.wide_bytes)


EMPTY = TextSize(0, 0)


def size_of(text: str) -> TextSize:
    """Measure a text. ASCII costs nothing; lone surrogates count three bytes each."""
    if text.isascii():
        return TextSize(len(text), 0)
    size = len(text.encode("utf-8", "surrogatepass"))
    # Each non-ASCII character has b >= 2 bytes, of which b - 1 >= b / 2 are beyond one a character.
    return TextSize(size, min(size, 2 * (size - len(text))))


@dataclass(frozen=True, slots=True)
class TextLimits:
    """The bounds of one tokenizer. Tokens, all of them; `special_tokens` are what it adds around a text if asked.

    `longest_token_bytes` is 0 where no lower bound is proven.
    """

    is_proven: bool
    stretch: int
    shrink: int
    prefix_tokens: int
    prefix_each_byte: bool
    longest_token_bytes: int
    special_tokens: int

    def upper(self, size: TextSize) -> int:
        """No text of this size has more tokens (proven only where `is_proven`), specials not counted."""
        if size.bytes == 0:
            return self.prefix_tokens
        tokens = size.bytes + (self.stretch - 1) * size.wide_bytes
        return (2 * tokens if self.prefix_each_byte else tokens) + self.prefix_tokens

    def lower(self, size: TextSize) -> int:
        """No text of this size has fewer tokens, specials not counted."""
        if self.longest_token_bytes == 0:
            return 0
        longest = self.longest_token_bytes * (self.shrink if size.wide_bytes else 1)
        return -(-size.bytes // longest)


#: For a model whose tokenizer is not known: one token a byte, which holds for all common ones, and nothing below.
UNKNOWN = TextLimits(
    is_proven=False,
    stretch=1,
    shrink=1,
    prefix_tokens=0,
    prefix_each_byte=False,
    longest_token_bytes=0,
    special_tokens=1,
)


def byte_bpe_limits(longest_token_bytes: int) -> TextLimits:
    """The bounds of a byte-level BPE without normalizer (tiktoken)."""
    return TextLimits(
        is_proven=True,
        stretch=1,
        shrink=1,
        prefix_tokens=0,
        prefix_each_byte=False,
        longest_token_bytes=longest_token_bytes,
        special_tokens=0,
    )


def limits_of(tokenizer_json: str, *, special_tokens: int) -> TextLimits:
    """Read the bounds off a serialized tokenizer (the content of a `tokenizer.json`).

    `special_tokens`: what its post-processor adds around one text.
    """
    description: dict[str, Any] = json.loads(tokenizer_json)
    model: Mapping[str, Any] = description["model"]
    added: list[dict[str, Any]] = description.get("added_tokens") or []
    normalizers = _flatten(description.get("normalizer"), "normalizers")
    cutters = _flatten(description.get("pre_tokenizer"), "pretokenizers")
    names = {cutter["type"] for cutter in cutters}
    is_byte_level = "ByteLevel" in names and model.get("type") == "BPE"
    stretch, shrink, prefixed = _normalized(normalizers)
    proven = stretch > 0 and names <= _CUTTERS
    if "Metaspace" in names or prefixed:
        # The mark that stands for a space is one token at most only if the vocabulary has it.
        proven = proven and (not model.get("byte_fallback") or _METASPACE in _words(model))
    prefixed = prefixed or _adds_prefix(cutters)
    tiny_added = any(len(token["content"].encode()) < 2 for token in added)
    keeps_all = is_byte_level and all(map(_keeps_all, cutters)) and not any(map(_swallows, added))
    keeps_all = keeps_all and all(letter in model["vocab"] for letter in ByteLevel.alphabet())
    longest = max(map(len, model["vocab"]), default=0) if keeps_all and shrink > 0 else 0
    if longest:
        longest = max(longest, *(len(token["content"].encode()) for token in added), 1)
    return TextLimits(
        is_proven=proven,
        stretch=max(1, stretch),
        shrink=max(1, shrink),
        prefix_tokens=1 if prefixed else 0,
        prefix_each_byte=prefixed and tiny_added,
        longest_token_bytes=longest,
        special_tokens=special_tokens,
    )


def _words(model: Mapping[str, Any]) -> set[str]:
    """The vocabulary; Unigram keeps its words in pairs with their scores."""
    return {word if isinstance(word, str) else word[0] for word in model.get("vocab", ())}


def _flatten(part: Mapping[str, Any] | None, children: str) -> list[Mapping[str, Any]]:
    """A `Sequence` of steps as a list, one step as a list of one, none as an empty list."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [leaf for child in part.get(children, []) for leaf in _flatten(child, children)]


def _normalized(steps: list[Mapping[str, Any]]) -> tuple[int, int, bool]:
    """Stretch, shrink and whether a prefix is put before the text. A factor of 0 means: not proven."""
    stretch, shrink, prefixed = 1, 1, False
    for step in steps:
        kind = step.get("type", "")
        if kind in _STRETCH:
            stretch *= _STRETCH[kind]
            shrink = shrink * _NFC_SHRINK if kind == "NFC" else 0
        elif kind == "Prepend" and step.get("prepend") == _METASPACE:
            prefixed, shrink = True, 0
        elif kind == "Replace" and step.get("content") == _METASPACE and step.get("pattern") == {"String": " "}:
            shrink = 0
        else:
            return 0, 0, prefixed
    return stretch, shrink, prefixed


def _adds_prefix(cutters: list[Mapping[str, Any]]) -> bool:
    return any(
        bool(cutter.get("add_prefix_space"))
        or (cutter["type"] == "Metaspace" and cutter.get("prepend_scheme", "always") != "never")
        for cutter in cutters
    )


def _keeps_all(cutter: Mapping[str, Any]) -> bool:
    """Whether this step drops no text."""
    return cutter["type"] in _DROPS_NOTHING or (cutter["type"] == "Split" and cutter.get("behavior") != "Removed")


def _swallows(added_token: Mapping[str, Any]) -> bool:
    """Whether this special token takes any amount of white space beside it along."""
    return bool(added_token.get("lstrip") or added_token.get("rstrip"))
