"""The base of every mapping in the file, and the walk over all settings.

Rules of the file: unknown keys are errors and nothing is converted (`"8080"` is no number); the one exception is a
value that came out of the environment, which has no type of its own.
"""

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from router.config.scalars import FromVariable, plain

_VARIABLE_PATTERN = r"\$\{[A-Za-z_][A-Za-z0-9_]*\}"


class Section(BaseModel):
    """A mapping in the file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_variables(cls, values: object) -> object:
        """`port: ${PORT}` is a number where a number is wanted, and text where text is."""
        if not isinstance(values, dict):
            return values
        return {
            key: plain(value) if isinstance(value, FromVariable) and _is_numeric(cls, key) else value
            for key, value in values.items()
        }


def _is_numeric(section: type[BaseModel], key: object) -> bool:
    field = section.model_fields.get(key) if isinstance(key, str) else None
    return field is not None and bool(_alternatives(field.annotation) & {int, float, bool})


def _alternatives(annotation: Any) -> set[Any]:
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return set(typing.get_args(annotation)) if is_union else {annotation}


def settings(root: type[Section]) -> Iterator[tuple[str, str, type[Section] | None]]:
    """Every setting under `root`: the place it stands in (`models[].pools.chat`), its name, and its section if it
    is one."""
    yield from _settings(root, "")


def _settings(section: type[Section], place: str) -> Iterator[tuple[str, str, type[Section] | None]]:
    for name, field in section.model_fields.items():
        inner, is_list = inner_section(field.annotation)
        yield place, name, inner
        if inner is not None:
            yield from _settings(inner, f"{place}.{name}".lstrip(".") + ("[]" if is_list else ""))


def inner_section(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section that a field holds, and whether it holds a list of them."""
    is_list = typing.get_origin(annotation) is list
    for candidate in typing.get_args(annotation) if is_list else _alternatives(annotation):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate, is_list
    return None, is_list


def finished_json_schema(root: type[Section]) -> dict[str, Any]:
    """Pydantic's JSON Schema of `root` as the loader reads the file: no nulls, and `${VAR}` wherever a value's own
    form would forbid it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_finished(root.model_json_schema())}


def _finished(node: dict[str, Any]) -> dict[str, Any]:
    """`node` and all under it. Recursion ends with pydantic's own schema, which is as deep as the sections."""
    alternatives = [one for one in node.get("anyOf", ()) if one.get("type") != "null"]
    if len(alternatives) == 1:
        node = {key: value for key, value in node.items() if key not in {"anyOf", "default"}} | alternatives[0]
    for key in ("properties", "$defs"):
        if key in node:
            node = {**node, key: {name: _finished(inner) for name, inner in node[key].items()}}
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            node = {**node, key: _finished(node[key])}
    if node.get("type") not in {"integer", "number", "boolean"} and not node.keys() & {"pattern", "enum"}:
        return node
    about: dict[str, Any] = {key: node[key] for key in ("title", "description", "default") if key in node}
    form = {key: value for key, value in node.items() if key not in about}
    return {**about, "anyOf": [form, {"type": "string", "pattern": _VARIABLE_PATTERN}]}
