"""The Lua operations and the keys they are given."""

import re
from importlib.resources import files

import pytest
from redis.crc import key_slot

from router.queue.keys import escape, ticket_keys, unescape
from router.queue.scripts import OPERATIONS, script

_FOLDER = files("router.queue") / "lua"


def test_the_folder_holds_the_operations_and_nothing_else() -> None:
    names = {entry.name for entry in _FOLDER.iterdir()}

    assert names == {"_line.lua", *(f"{operation}.lua" for operation in OPERATIONS)}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_script_says_what_it_takes_and_gives(operation: str) -> None:
    head = (_FOLDER / f"{operation}.lua").read_text().partition("\n\n")[0]

    assert re.match(r"-- [A-Z]", head)
    for word in ("-- KEYS ", "-- ARGV ", "-- Returns "):
        assert word in head


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_script_touches_declared_keys_only_and_has_no_open_loop(operation: str) -> None:
    source = script(operation).source.decode()

    calls = re.findall(r"redis\.call\('([A-Z]+)'(?:, (\w+))?", source)

    assert {key for command, key in calls if command != "TIME"} <= {
        "ORDER",
        "HEADS",
        "TICKETS",
        "SUMS",
        "OWNERS",
        "SEQ",
    }
    assert "while" not in re.sub(r"--.*", "", source)
    assert "repeat" not in re.sub(r"--.*", "", source)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_argument_a_script_reads_is_in_its_head(operation: str) -> None:
    text = (_FOLDER / f"{operation}.lua").read_text()
    head, body = text.partition("local ")[0], text.partition("local ")[2]

    read = {int(number) for number in re.findall(r"ARGV\[(\d)\]", body)}

    assert read == set(range(1, len(read) + 1))
    assert all(re.search(rf"\b{number} \w", head) for number in read)


@pytest.mark.parametrize("prefix", ["router", "a:b", "{x}", "}{", "{}"])
@pytest.mark.parametrize("model", ["m", "", "{}", "}x{", "模型", "a b", "n\0", "x" * 1_000, "\ud800"])
def test_all_keys_of_a_model_lie_in_one_slot(prefix: str, model: str) -> None:
    keys = ticket_keys(prefix, model)

    assert len(set(keys)) == 6
    assert len({key_slot(key.encode()) for key in keys}) == 1
    assert all(key.isascii() and key.isprintable() and " " not in key and len(key) < 200 for key in keys)


def test_models_are_spread_over_the_slots() -> None:
    slots = {key_slot(ticket_keys("{same}", f"model{number}")[0].encode()) for number in range(50)}

    assert len(slots) > 40


def test_no_two_names_share_a_key() -> None:
    names = ["m", "m ", "%6D", "M", "{m}", "m}", "x" * 500, "x" * 501, "!" + "x" * 64, "a/b", "a%2Fb", "a:b"]

    keys = {ticket_keys("p", name)[0] for name in names}

    assert len(keys) == len(names)


@pytest.mark.parametrize("text", ["me", "a b!", "é\0\n", "\ud800", "100%"])
def test_an_escaped_owner_comes_back_whole(text: str) -> None:
    escaped = escape(text)

    assert unescape(escaped.encode()) == text
    assert re.fullmatch(r"[A-Za-z0-9_.~%-]+", escaped)
