"""Schema, documents and frozen types say the same."""

import json
import re
from dataclasses import fields
from pathlib import Path

from router.config import model
from router.config.schema import File, json_schema
from router.config.section import Section, settings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def _field(place, name):
    section = File
    for part in filter(None, place.split(".")):
        inner = {n: s for p, n, s in settings(section) if not p}[part.removesuffix("[]")]
        assert inner is not None
        section = inner
    return section.model_fields[name]


def _paths():
    return {f"{place}.{name}".lstrip("."): _field(place, name) for place, name, _section in settings(File)}


def _chapters():
    """Each setting's heading in the page, with the text under it."""
    parts = re.split(r"^#{2,3} `([^`]+)`$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_setting_has_a_heading_in_the_documents_and_none_is_stale():
    assert set(_chapters()) == set(_paths())


def test_the_documents_describe_each_setting_as_the_schema_does_with_its_default():
    chapters = _chapters()

    for path, field in _paths().items():
        assert field.description is not None, path
        assert field.description in chapters[path], path
        default = field.default
        if field.is_required():
            assert "Required." in chapters[path], path
        elif isinstance(default, bool | str | int | float):
            text = f"{default:g}" if isinstance(default, float) else str(default)
            text = text.lower() if isinstance(default, bool) else text
            assert f"Default: `{text}`." in chapters[path], path


def test_every_setting_has_a_place_in_the_frozen_types():
    frozen = {
        field.name
        for owner in vars(model).values()
        if isinstance(owner, type) and hasattr(owner, "__dataclass_fields__")
        for field in fields(owner)
    }

    named = {name for _place, name, section in settings(File) if section is None}

    assert named - frozen == {"key", "key_sha256"}


def test_the_json_schema_is_draft_2020_12_with_descriptions_and_defaults():
    schema = json_schema()

    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["engines", "models"]
    port = schema["$defs"]["Server"]["properties"]["port"]
    assert (port["default"], port["description"]) == (8080, "TCP port to listen on; 0 takes a free one.")
    assert {"type": "integer", "minimum": 0, "maximum": 65535} in port["anyOf"]


def test_the_json_schema_lets_a_variable_stand_for_a_number_and_no_value_be_null():
    schema = json_schema()
    text = json.dumps(schema)

    weight = schema["$defs"]["Key"]["properties"]["weight"]
    assert any(re.search(one.get("pattern", "^$"), "${WEIGHT}") for one in weight["anyOf"])
    assert '"null"' not in text
    assert '"default": null' not in text


def test_every_definition_refuses_unknown_keys():
    for name, definition in json_schema()["$defs"].items():
        assert definition["additionalProperties"] is False, name


def test_every_number_has_a_lower_and_an_upper_bound():
    def bounds(section, path):
        for _place, name, inner in (entry for entry in settings(section) if not entry[0]):
            field = section.model_fields[name]
            if inner is None and re.search(r"\b(int|float)\b", str(field.annotation)):
                limits = {type(limit).__name__ for limit in field.metadata}
                assert limits & {"Ge", "Gt"}, (path, name)
                assert limits & {"Le", "Lt"}, (path, name)
            if inner is not None:
                bounds(inner, f"{path}.{name}")

    bounds(File, "")
    assert issubclass(File, Section)
