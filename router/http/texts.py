"""Prompts that are no conversation: texts, token ids, and pairs of texts, read from a body's JSON.

Each kind is read as such and no other, so that no more objects are made than the prompts have parts.
"""

import re
from typing import TypeVar

import msgspec

from router.errors import bad_request
from router.request import Prompt, TextPrompts, TokenPrompts

#: Sequences of one request, prompts times `n`; OpenAI takes 2,048 inputs at most.
SEQUENCES_MAX = 16_384
#: Pairs of texts are written out to be counted up to here: a long query times many documents is far more than the body.
_PAIRS_MAX_CHARS = 32 * 2**20

#: Longer lists of token ids are not made into values, 30 ns each: their commas are counted.
_IDS_MAX_BYTES = 2**20
#: What the ids of a list, and the space between them, are written with.
_ID_BYTES = b"-0123456789 \t\r\n"
_EMPTY_LIST = re.compile(rb"\[\s*\]")

_T = TypeVar("_T")

_TEXTS = msgspec.json.Decoder(str | list[str])
_IDS = msgspec.json.Decoder(list[int])
_LISTS_OF_IDS = msgspec.json.Decoder(list[list[int]])


def texts_or_tokens(json: msgspec.Raw, name: str, *, add_special_tokens: bool) -> Prompt:
    """A string, a list of strings, a list of token ids, or a list of such lists.

    Raises: `ApiError` 400 for anything else, and for more lists than a request may have sequences.
    """
    texts = _decode_as(_TEXTS, json)
    if isinstance(texts, str):
        return TextPrompts((texts,), add_special_tokens)
    if texts:
        return TextPrompts(tuple(texts), add_special_tokens)
    if texts is None and len(plain := bytes(json)) > _IDS_MAX_BYTES:
        if lengths := _lengths(plain):
            return TokenPrompts(lengths)
        raise _no_prompt(name)
    ids = _decode_as(_IDS, json)
    if ids:
        return TokenPrompts((len(ids),))
    # Only numbers are in such lists, so each bracket but the outermost begins one of them.
    lists = bytes(json).count(b"[") - 1
    if ids is None and 0 < lists <= SEQUENCES_MAX:
        several = _decode_as(_LISTS_OF_IDS, json)
        if several and all(several):
            return TokenPrompts(tuple(map(len, several)))
    raise _no_prompt(name)


def _no_prompt(name: str) -> Exception:
    return bad_request(
        f"`{name}` must be a string, a non-empty list of strings, a non-empty list of token ids, or a list of at most "
        f"{SEQUENCES_MAX:,} such lists; the kinds may not be mixed.",
        param=name,
    )


def _lengths(json: bytes) -> tuple[int, ...]:
    """How many ids a list has, or each list of a list; empty where it is none. Whether an id is one is the engine's to
    say, here it is only no text, object or fraction."""
    marks = json.translate(None, _ID_BYTES)
    if not marks.startswith(b"["):
        return ()
    inner = marks[1:-1]
    if inner and b"[" not in inner:
        return () if inner.translate(None, b",") else (len(inner) + 1,)
    if _EMPTY_LIST.search(json):
        return ()
    if not inner:
        return (1,)
    *parts, after = inner.split(b"]", SEQUENCES_MAX + 1)
    if after or len(parts) > SEQUENCES_MAX:
        return ()
    lengths: list[int] = []
    for part in parts:
        before, bracket, ids = part.partition(b"[")
        if before != (b"," if lengths else b"") or not bracket or ids.translate(None, b","):
            return ()
        lengths.append(len(ids) + 1)
    return tuple(lengths)


def _decode_as(decoder: msgspec.json.Decoder[_T], json: msgspec.Raw) -> _T | None:
    """The value of `json` if it is of the decoder's kind."""
    try:
        return decoder.decode(json)
    except msgspec.DecodeError:
        return None


def pairs(first: msgspec.Raw, second: msgspec.Raw) -> tuple[str, ...]:
    """Texts of `first` and `second` one after the other, as they share a sequence; one first text goes with all second
    ones. Empty where they are not texts, or too long to be paired here."""
    firsts, seconds = _decode_as(_TEXTS, first), _decode_as(_TEXTS, second)
    if firsts is None or seconds is None:
        return ()
    firsts, seconds = ([texts] if isinstance(texts, str) else texts for texts in (firsts, seconds))
    if not firsts or not seconds:
        return ()
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if sum(map(len, firsts)) + sum(map(len, seconds)) > _PAIRS_MAX_CHARS:
        return ()
    return tuple(a + b for a, b in zip(firsts, seconds, strict=False))
