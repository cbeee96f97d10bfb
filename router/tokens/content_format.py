"""Reads a chat template without running it: which form of content it wants, and which variables it uses.

vLLM gives a template that loops over a message's content the list of parts (`openai`), and every other template one
string. It decides from the template's syntax tree; this must come to the same answer. Source: vLLM 0.32,
`vllm/renderers/hf.py`. What it does not understand is `string` there, so it is here.

It must never run a template.
"""

from collections.abc import Iterator
from enum import StrEnum

from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ContentFormat(StrEnum):
    """The form in which a template is given `message.content`."""

    STRING = "string"
    OPENAI = "openai"


class _GenerationTag(Extension):
    """Transformers' `{% generation %}` block, which is plain content to a reader."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _NotUnderstood(Exception):
    """The template binds a loop or an assignment to something other than a plain name."""


def parse_template(template: str) -> nodes.Template:
    """The syntax tree of a template.

    Raises: jinja2.TemplateSyntaxError where it is not one.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    return environment.parse(template)


def template_variables(tree: nodes.Template) -> frozenset[str]:
    """Names the template takes from outside."""
    return frozenset(meta.find_undeclared_variables(tree))


def detect_content_format(template: str) -> ContentFormat:
    """Whether the engine hands this template strings or lists of parts."""
    try:
        tree = parse_template(template)
        is_list = any(_content_loops(tree))
    except (TemplateError, _NotUnderstood, RecursionError):
        return ContentFormat.STRING
    return ContentFormat.OPENAI if is_list else ContentFormat.STRING


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is `name` (or `name.key`, `name['key']`), behind any filters, tests and slices."""
    while node is not None:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
            continue
        if key is None:
            return _is_name(node, name)
        if isinstance(node, nodes.Getattr):
            return node.attr == key and _is_name(node.node, name)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            return bool(node.arg.value == key) and _is_name(node.node, name)
        return False
    return False


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _target_name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _NotUnderstood
    return target.name


def _message_lists(tree: nodes.Template) -> list[str]:
    """Every name that holds the conversation: `messages`, and what it is assigned to, step by step."""
    names = ["messages"]
    for name in names:
        for assign in tree.find_all(nodes.Assign):
            if _reads(assign.node, name):
                target = _target_name(assign.target)
                if target not in names:
                    names.append(target)
    return names


def _message_names(tree: nodes.Template) -> list[str]:
    """Every loop variable that holds one message."""
    lists = _message_lists(tree)
    return [
        _target_name(loop.target) for loop in tree.find_all(nodes.For) if any(_reads(loop.iter, name) for name in lists)
    ]


def _content_loops(tree: nodes.Template) -> Iterator[bool]:
    """One True for each loop over a message's content, in the template's order."""
    messages = _message_names(tree)
    given_content: dict[int, frozenset[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        parameters = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            # A loop in an inner macro keeps what its outer macro was given, if the inner one is given nothing.
            given_content[id(loop)] = parameters or given_content.get(id(loop), frozenset())
    for loop in tree.find_all(nodes.For):
        is_content = any(_reads(loop.iter, name, "content") for name in messages)
        if not is_content and isinstance(loop.iter, nodes.Name):
            is_content = loop.iter.name in given_content.get(id(loop), frozenset({"content"}))
        if is_content:
            _target_name(loop.target)
            yield True


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> frozenset[str]:
    """The parameters of a macro that some call gives a message's content."""

    def is_content(node: nodes.Node) -> bool:
        return any(_reads(node, name, "content") for name in messages)

    names = [argument.name for argument in macro.args]
    found = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            found |= {name for name, value in zip(names, call.args, strict=False) if is_content(value)}
            found |= {given.key for given in call.kwargs if given.key in names and is_content(given.value)}
    return frozenset(found)
