"""Which form of content a template is given."""

import pytest

from router.tokens.content_format import ContentFormat, detect_content_format, parse_template, template_variables
from tests.tokens.model_folder import TEMPLATES

LOOP = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
MACRO = (
    "{{% macro show({parameters}) %}}{{% for part in body %}}{{{{ part }}}}{{% endfor %}}{{% endmacro %}}"
    "{{% for m in messages %}}{{{{ show({call}) }}}}{{% endfor %}}"
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("simple", "string"), ("tools", "string"), ("strict", "string"), ("parts", "openai")],
)
def test_each_of_the_test_models_is_read_right(name: str, expected: str) -> None:
    assert detect_content_format(TEMPLATES[name]) == expected


@pytest.mark.parametrize(
    "template",
    [
        LOOP,
        LOOP.replace("message.content", "message['content']"),
        LOOP.replace("message.content", "message.content | list"),
        LOOP.replace("message.content", "message['content'][1:]"),
        "{% set rest = messages[1:] %}{% set all = rest %}" + LOOP.replace("in messages", "in all"),
        "{% for m in messages %}{% set content = m.content %}{% for c in content %}{{ c }}{% endfor %}{% endfor %}",
        MACRO.format(parameters="body", call="m.content"),
        MACRO.format(parameters="a, body", call="1, body=m['content']"),
        "{% generation %}" + LOOP + "{% endgeneration %}",
    ],
)
def test_a_loop_over_the_content_asks_for_parts(template: str) -> None:
    assert detect_content_format(template) is ContentFormat.OPENAI


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        LOOP.replace("message.content", "message.tool_calls"),
        "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}",
        "{% set ns.list = messages %}" + LOOP,
        "{% for role, message in messages %}{{ message }}{% endfor %}" + LOOP,
        "{% for broken",
        "",
    ],
)
def test_all_other_templates_are_given_one_text(template: str) -> None:
    assert detect_content_format(template) is ContentFormat.STRING


def test_variables_from_outside_are_found() -> None:
    variables = template_variables(parse_template(TEMPLATES["tools"]))

    assert {"messages", "tools", "documents", "enable_thinking", "style", "bos_token"} <= variables
    assert "message" not in variables
