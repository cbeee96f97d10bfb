"""The bounds that are told from a tokenizer's description, and the Unicode facts they stand on."""

import json
import random
import sys
import unicodedata
from typing import Any, Literal

import pytest
import tokenizers

from router.tokens.limits import TextLimits, byte_bpe_limits, limits_of, size_of
from tests.tokens.model_folder import tokenizer_file
from tests.tokens.varied_chats import text_of

_EVERY_CHARACTER = [chr(point) for point in range(0x80, sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]


def _described(**changes: Any) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(tokenizer_file().read_text(encoding="utf-8"))
    return description | changes


def _limits(**changes: Any) -> TextLimits:
    return limits_of(json.dumps(_described(**changes)), special_tokens=0)


def _utf8(text: str) -> int:
    return len(text.encode())


@pytest.mark.parametrize(("form", "factor"), [("NFC", 3), ("NFD", 3), ("NFKC", 11), ("NFKD", 11)])
def test_no_character_grows_more_than_its_normal_form_is_said_to(
    form: Literal["NFC", "NFD", "NFKC", "NFKD"], factor: int
) -> None:
    worst = max(_utf8(unicodedata.normalize(form, char)) / _utf8(char) for char in _EVERY_CHARACTER)

    assert worst <= factor


def test_no_character_shrinks_more_than_ninefold_on_its_way_through_nfc() -> None:
    before = max(_utf8(char) / _utf8(unicodedata.normalize("NFD", char)) for char in _EVERY_CHARACTER)
    composed = [char for char in _EVERY_CHARACTER if unicodedata.normalize("NFC", char) == char]
    after = max(_utf8(unicodedata.normalize("NFD", char)) / _utf8(char) for char in composed)

    assert before * after <= 9


def test_lower_case_at_most_doubles_a_character() -> None:
    assert max(_utf8(char.lower()) / _utf8(char) for char in _EVERY_CHARACTER) <= 2


def test_the_size_of_a_text_counts_bytes_and_bounds_those_of_wide_characters() -> None:
    for text in ("", "plain", "é", "naïve €10", "人a🙂", "\ud800x"):
        size = size_of(text)
        wide = sum(len(char.encode("utf-8", "surrogatepass")) for char in text if not char.isascii())

        assert size.bytes == len(text.encode("utf-8", "surrogatepass"))
        assert wide <= size.wide_bytes <= size.bytes


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}, {"type": "NFKC"}])
def test_every_count_of_a_real_tokenizer_lies_between_its_bounds(normalizer: dict[str, Any] | None) -> None:
    description = json.dumps(_described(normalizer=normalizer))
    tokenizer = tokenizers.Tokenizer.from_str(description)
    limits = limits_of(description, special_tokens=0)
    rng = random.Random(11)
    texts = [text_of(rng, rng.randrange(1, 80)) for _ in range(200)]
    texts += [
        "".join(chr(rng.choice([rng.randrange(32, 0x3000), 0x301, 0x323])) for _ in range(60)) for _ in range(200)
    ]
    texts += ["\ufdfa" * 30, "\U0001d160" * 30, "\u0390" * 30, " " * 999, "a" * 999, ""]

    counts = [len(encoding) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    assert limits.is_proven
    assert all(
        limits.lower(size_of(text)) <= count <= limits.upper(size_of(text))
        for text, count in zip(texts, counts, strict=True)
    )


def test_a_byte_level_tokenizer_without_normalizer_has_a_byte_a_token_as_its_bound() -> None:
    limits = _limits(normalizer=None)

    assert limits.upper(size_of("人" * 10)) == 30
    assert limits.longest_token_bytes == 128
    assert limits.lower(size_of("x" * 1280)) == 10


def test_nfc_triples_only_what_is_not_ascii() -> None:
    limits = _limits(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]})

    assert limits.upper(size_of("plain text")) == 10
    assert limits.upper(size_of("人人")) == 18


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}},
        {"pre_tokenizer": {"type": "SomethingNew"}},
    ],
)
def test_what_is_not_known_proves_nothing(changes: dict[str, Any]) -> None:
    assert not _limits(**changes).is_proven


def test_a_tokenizer_that_drops_text_has_no_lower_bound() -> None:
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    dropping = _limits(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]})
    swallowing = _limits(added_tokens=[{"content": "<mask>", "lstrip": True, "rstrip": False}])

    assert dropping.lower(size_of("x" * 5000)) == 0
    assert swallowing.lower(size_of("x" * 5000)) == 0
    assert dropping.is_proven


def test_a_prefix_space_is_allowed_for() -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}

    limits = _limits(pre_tokenizer=byte_level)
    tiny = _limits(pre_tokenizer=byte_level, added_tokens=[{"content": "|"}])

    assert limits.upper(size_of("abc")) == 4
    assert tiny.upper(size_of("abc")) == 7


def test_a_sentencepiece_like_tokenizer_with_byte_fallback_is_bounded_by_bytes() -> None:
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    model = {"type": "BPE", "byte_fallback": True, "vocab": {"▁": 0, "a": 1, "<0x00>": 2}, "merges": []}
    nameless = model | {"vocab": {"a": 1}}

    limits = _limits(normalizer={"type": "Sequence", "normalizers": steps}, pre_tokenizer=None, model=model)
    unproven = _limits(normalizer={"type": "Sequence", "normalizers": steps}, pre_tokenizer=None, model=nameless)

    assert limits.is_proven
    assert limits.upper(size_of("a a a")) == 6
    assert limits.lower(size_of("a a a")) == 0
    assert not unproven.is_proven


def test_tiktoken_is_bounded_by_bytes_and_its_longest_token() -> None:
    limits = byte_bpe_limits(longest_token_bytes=4)

    assert limits.upper(size_of("abcdé")) == 6
    assert limits.lower(size_of("abcdé")) == 2
