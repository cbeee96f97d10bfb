"""What one YAML scalar means: `${VAR}` expansion and the types of plain text.

Rules of the file: a plain scalar is read by the YAML 1.2 core schema without octal and hexadecimal numbers, so that
`yes`, `010`, `12:30` and `2024-01-01` stay text instead of turning into what nobody meant. What a variable holds is
never read as YAML and never expanded again. A text from which something was expanded is a `FromVariable`: a field
that wants a number may still read one out of it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

Scalar = str | int | float | bool | None

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?")

_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)(\}?)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: `key: $ROUTER_KEY`: a shell's way to write it, which would become the key itself.
_BARE_REFERENCE = re.compile(r"\$[A-Z_][A-Z0-9_]*")


class FromVariable(str):
    """A text of which at least a part came out of the environment."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class BadReference(Exception):
    """A `${...}` that cannot be expanded. Both texts name the variable, neither says what it holds."""

    message: str
    fix: str


def plain(text: str) -> Scalar:
    """The value of an unquoted scalar."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def expand(text: str, environ: Mapping[str, str]) -> str:
    """`text` with every `${NAME}` replaced and every `$${` turned into `${`.

    A text without a reference comes back as it is. Raises: `BadReference`.
    """
    if "$" not in text:
        return text
    if _BARE_REFERENCE.fullmatch(text):
        raise BadReference(
            f"{text} is not replaced, only ${{NAME}} is", f"Write ${{{text[1:]}}} for the variable of that name."
        )
    expanded = False

    def replace(match: re.Match[str]) -> str:
        nonlocal expanded
        if match.group() == "$${":
            return "${"
        expanded = True
        return _lookup(match.group(1), closed=bool(match.group(2)), environ=environ)

    result = _REFERENCE.sub(replace, text)
    return FromVariable(result) if expanded else result


def _lookup(name: str, *, closed: bool, environ: Mapping[str, str]) -> str:
    if not closed or not _NAME.fullmatch(name):
        raise BadReference(
            "a ${...} here is not the name of a variable",
            "Write ${NAME} with letters, digits and underscores, or $${ for a literal ${.",
        )
    value = environ.get(name)
    if value is None:
        raise BadReference(f"the environment variable {name} is not set", f"Set {name} before the router starts.")
    if not value.strip():
        raise BadReference(f"the environment variable {name} is set but empty", f"Give {name} a value.")
    if "${" in value:
        raise BadReference(
            f"the environment variable {name} holds a ${{...}} itself, which is not expanded",
            f"Set {name} to the final value.",
        )
    return value
