"""From the tree to the schema: every value of a wrong form becomes a problem, and what is left is made whole.

So that one run finds all mistakes, faulty values are replaced by stand-ins and the rest is validated again; their
paths are marked bad in the document, and no rule is applied to them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from router.config.document import Document
from router.config.places import advise, pattern
from router.config.problems import KeyPath, render
from router.config.scalars import FromVariable
from router.config.schema import File

#: One round a level of the tree is enough; a file has at most seven.
_ROUNDS_MAX = 10

#: For required settings: something valid. Nothing is built from it, since a problem has been noted.
_STAND_INS: Mapping[str, Callable[[int], Any]] = {
    "engines": lambda n: [{"name": f"unknown-{n}", "url": f"http://unknown-{n}.invalid"}],
    "engines[]": lambda n: {"name": f"unknown-{n}", "url": f"http://unknown-{n}.invalid"},
    "engines[].name": lambda n: f"unknown-{n}",
    "engines[].url": lambda n: f"http://unknown-{n}.invalid",
    "models": lambda n: [{"name": f"unknown-{n}", "pools": {}}],
    "models[]": lambda n: {"name": f"unknown-{n}", "pools": {}},
    "models[].name": lambda n: f"unknown-{n}",
    "models[].aliases[]": lambda n: f"unknown-{n}",
    "models[].pools": lambda _: {},
    "relays[]": lambda n: {"name": f"unknown-{n}", "url": "http://unknown.invalid", "models": {"unknown": "unknown"}},
    "relays[].name": lambda n: f"unknown-{n}",
    "relays[].url": lambda n: f"http://unknown-{n}.invalid",
    "relays[].models": lambda _: {"unknown": "unknown"},
    "relays[].classes[]": lambda _: "chat",
    "keys[]": lambda n: {"name": f"unknown-{n}", "key": "unknown"},
    "keys[].name": lambda n: f"unknown-{n}",
    "keys[].may_set[]": lambda _: "class",
    **{
        f"models[].pools.{pool}{setting}": stand_in
        for pool in ("chat", "batch")
        for setting, stand_in in (
            (".engines", lambda n: [f"unknown-{n}"]),
            (".engines[]", lambda n: f"unknown-{n}"),
            (".max_model_len", lambda _: 1),
            (".max_num_seqs", lambda _: 1),
        )
    },
}

_MAGNITUDE = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([a-zA-Z%]*)\s*")
_BYTES = {"k": 1024, "m": 1024**2, "g": 1024**3}
_SECONDS = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def validate(document: Document) -> File | None:
    """The file's content in its schema, stand-ins included; None where too little is right to go on.

    Adds to `document.problems` and `document.bad`. The result may be used only where `document.problems` is empty,
    or to look for further problems outside the bad paths.
    """
    _refuse_nulls(document)
    unknown = 0
    for _ in range(_ROUNDS_MAX):
        errors = _errors(document.root)
        if isinstance(errors, File):
            return errors
        # Unknown keys first: what they were meant for is not missing.
        for error in sorted(errors, key=lambda error: error["type"] != "extra_forbidden"):
            path = _path(error)
            is_emptied = error["type"] == "too_short" and document.has_bad_below(path)
            if not document.is_bad(path) and not is_emptied:
                _note(document, path, error)
            unknown += 1
            _repair(document, path, unknown)
    return None


def _errors(root: dict[str, Any]) -> File | list[ErrorDetails]:
    try:
        return File.model_validate(root)
    except ValidationError as error:
        return error.errors(include_url=False, include_input=False)


def _path(error: ErrorDetails) -> KeyPath:
    """Pydantic marks a mapping's key, as opposed to its value, by a last part `[key]`."""
    path = error["loc"]
    return path[:-1] if path and path[-1] == "[key]" else path


def _refuse_nulls(document: Document) -> None:
    """`keys:` with nothing after it must not come to mean "no keys": no setting is ever empty."""
    for path, place in list(document.places.items()):
        if not place.is_collection and document.get(path) is None and not document.is_bad(path):
            last = render(path[-1:])
            document.add(path, "has no value", f"Give {last} a value, or remove it.", value="(empty)")
            _repair(document, path, len(document.bad))


def _repair(document: Document, path: KeyPath, number: int) -> None:
    """Replace what stands at `path` by a stand-in, or take it out where the setting may be left out."""
    holder = document.get(path[:-1])
    stand_in = _STAND_INS.get(pattern(path))
    key: Any = path[-1]
    if isinstance(holder, dict) and stand_in is None:
        holder.pop(key, None)
    elif isinstance(holder, dict | list) and stand_in is not None:
        holder[key] = stand_in(number)


def _note(document: Document, path: KeyPath, error: ErrorDetails) -> None:
    kind = error["type"]
    context: Mapping[str, Any] = error.get("ctx", {})
    if kind == "extra_forbidden":
        advice = advise(path)
        # What stands under an unknown key may be a secret.
        document.add(path, "this key is not known here", advice.fix, value="(not shown)")
        document.bad.update(meant for meant in advice.meant if meant not in document.places)
    elif kind == "missing":
        message = "this setting is required"
        holder = render(path[:-1]) if len(path) > 1 else "the top level"
        document.add(path, message, f"Add {render(path[-1:])} to {holder}.", value="(not set)")
    elif kind in {"list_type", "dict_type", "model_type", "model_attributes_type"}:
        wanted = "a list (lines that begin with -)" if kind == "list_type" else "a mapping (lines of key: value)"
        value = document.places[path].raw if _is_collection(document, path) else "(a single value)"
        document.add(path, f"is not {wanted}", f"Write {wanted} under it.", value=value)
    else:
        message, fix = _of_value(document, path, kind, context)
        document.add(path, message, fix)


def _is_collection(document: Document, path: KeyPath) -> bool:
    return path in document.places and document.places[path].is_collection


def _of_value(document: Document, path: KeyPath, kind: str, context: Mapping[str, Any]) -> tuple[str, str]:
    """Message and fix for a scalar that is wrong in itself."""
    value = document.get(path)
    unit = _unit(path)
    if kind in {"int_type", "float_type", "int_from_float", "int_parsing", "float_parsing"}:
        wanted = "a whole number" if kind.startswith("int") else "a number"
        return f"is not {wanted}{unit}", _number_fix(path, value, is_int=kind.startswith("int"))
    if kind == "bool_type":
        word = _BOOLEANS.get(str(value).lower())
        return "is neither true nor false", f"Write {word}." if word else "Write true or false."
    if kind == "string_type":
        return "is not a text", "Write one text, in quotes if it looks like a number."
    if kind in {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"}:
        return "is out of range", _range_fix(path, kind, context, unit)
    if kind in {"too_short", "string_too_short"}:
        return "is empty", "Give it at least one entry." if kind == "too_short" else "Give it a value."
    if kind in {"too_long", "string_too_long"}:
        return "is too long", f"At most {context.get('max_length')} are allowed."
    if kind == "literal_error":
        return "is not one of the possible values", f"Write {context.get('expected')}."
    if kind == "string_pattern_mismatch":
        return "has a form that cannot be used", _form_fix(path)
    return "cannot be used", "See docs/configuration.md."


def _unit(path: KeyPath) -> str:
    last = str(path[-1]) if path else ""
    for suffix, unit in (("_s", "seconds"), ("_bytes", "bytes"), ("_tokens", "tokens"), ("_model_len", "tokens")):
        if last.endswith(suffix):
            return f" of {unit}"
    return ""


def _number_fix(path: KeyPath, value: object, *, is_int: bool) -> str:
    """For `8k`, `1_000`, `64MiB`, `30s` and `60%`: the number that was meant."""
    match = _MAGNITUDE.fullmatch(value) if isinstance(value, str) else None
    last = str(path[-1])
    if isinstance(value, FromVariable):
        return "Set the variable to a number alone, without a unit."
    plainly = "Write the number alone, without quotes or a unit."
    if isinstance(value, float) and is_int:
        return f"Write {round(value)}." if abs(value) < 2**53 else plainly
    if match is None or len(match.group(1)) > 20:
        return plainly
    number, suffix = float(match.group(1).replace("_", "").replace(",", "")), match.group(2).lower()
    if last.endswith("_s"):
        factor = _SECONDS.get(suffix) if suffix else 1
    elif suffix == "%":
        factor = 0.01 if not is_int else None
    else:
        factor = _BYTES.get(re.sub(r"(i?b|tokens)$", "", suffix)) if suffix else 1
    if factor is None:
        return plainly
    return f"Write {_plain_number(number * factor)}."


def _plain_number(number: float) -> str:
    return str(round(number)) if number == round(number) else f"{number:.6g}"


def _range_fix(path: KeyPath, kind: str, context: Mapping[str, Any], unit: str) -> str:
    if kind == "finite_number":
        return "Write a finite number."
    words = {
        "greater_than": "above",
        "greater_than_equal": "at least",
        "less_than": "below",
        "less_than_equal": "at most",
    }
    limit = context[{"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt"}.get(kind, "le")]
    also = " (a ratio lies between 0 and 1)" if str(path[-1]).endswith("_ratio") else ""
    return f"It must be {words[kind]} {_plain_number(float(limit))}{unit}{also}."


def _form_fix(path: KeyPath) -> str:
    last = str(path[-1])
    if last == "key_sha256":
        return "Write the 64 hexadecimal digits of the key's SHA-256."
    if last in {"key", "api_key"}:
        return "A key has printable ASCII characters only, without spaces."
    if "model" in last or pattern(path).startswith(("models[].name", "models[].aliases", "relays[].models")):
        return "A model's name has printable characters only, without spaces and braces."
    return "Begin with a letter or digit, then letters, digits and . _ : @ / + - only."
