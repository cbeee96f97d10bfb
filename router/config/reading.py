"""The file as it was written: bytes to a `Document` with a tree of plain values.

Rules of the file: it knows YAML and nothing of what the keys mean. It is bounded (bytes, nodes, depth) and never
expands an alias, so no file can make it work or grow without end. It reports every duplicate key, anchor, alias, tag
and bad `${VAR}` it meets; only what leaves no tree at all (not readable, not UTF-8, not YAML) ends the reading.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from router.config.document import Document, Place
from router.config.problems import ConfigErrors, KeyPath, problem, render
from router.config.scalars import BadReference, expand, plain

#: A configuration with a thousand engines is about 100 KiB.
FILE_BYTES_MAX = 1024 * 1024
NODES_MAX = 20_000
DEPTH_MAX = 16

#: The one place where a mapping's keys are names of the operator's own, and so may come from variables.
_NAMED_KEYS = re.compile(r"relays\[\d+\]\.models")
#: Quoted parts of the parser's texts can hold what stands in the file, so only single characters are kept.
_QUOTED = re.compile(r"'[^'<]{2,}'|\"[^\"<]{2,}\"")


def read_document(file: Path, environ: Mapping[str, str]) -> Document:
    """Read `file` and expand its variables.

    Raises: `ConfigErrors` where there is no tree to go on with. Everything else is in `problems` of the result.
    """
    text = _read_text(file)
    document = Document(file)
    builder = _Builder(document, environ)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.take(event)
    except ConfigErrors as error:
        fatal = error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        message = f"not valid YAML at column {column}: {_QUOTED.sub('...', error.problem or 'syntax error')}"
        fatal = _fatal(file, line, message, _syntax_fix(text, line))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"the character U+{_code_point(error.character):04X} is not allowed in YAML"
        fatal = _fatal(file, line, message, "Take it out, or write it as an escape between double quotes.")
    else:
        if not isinstance(document.get(()), dict) or () not in document.places:
            raise _fatal(file, 1, "the file holds no settings", "Start it with `engines:` and `models:`.")
        return document
    raise ConfigErrors((*document.problems, *fatal.problems))


def _syntax_fix(text: str, line: int) -> str:
    lines = text.splitlines()
    if any("${" in near for near in lines[max(0, line - 2) : line]):
        return 'Write "${NAME}" in quotes: unquoted it cannot stand between { and }.'
    return "Check the indentation, colons and quotes on this line and the one above."


def _code_point(character: object) -> int:
    return character if isinstance(character, int) else ord(str(character)[:1])


def _fatal(file: Path, line: int, message: str, fix: str) -> ConfigErrors:
    return ConfigErrors((problem(file, line, "(file)", "(unreadable)", message, fix),))


def _read_text(file: Path) -> str:
    data = b""
    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        fix = "Name the configuration with -c, or copy pools.yaml and edit it."
        raise _fatal(file, 1, "there is no such file", fix) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        fix = "Give the router a file that it may read."
        raise _fatal(file, 1, f"cannot be read: {reason or 'not a file name'}", fix) from None
    if len(data) > FILE_BYTES_MAX:
        raise _fatal(file, 1, f"larger than {FILE_BYTES_MAX} bytes", "Take out what is not configuration.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise _fatal(file, line, f"not UTF-8 at byte {column} of this line", "Save the file as UTF-8.") from None


@dataclass(slots=True)
class _Open:
    """A collection being read. In a mapping, `key` is the key whose value comes next."""

    path: KeyPath
    values: dict[str, Any] | list[Any]
    key: str | None = None
    #: A duplicate's value, or what stands under a refused key: read over, but not kept.
    discarded: bool = False
    next_discarded: bool = False


class _Builder:
    """Turns the parser's events into the tree, without recursion."""

    def __init__(self, document: Document, environ: Mapping[str, str]) -> None:
        self._document = document
        self._environ = environ
        self._stack: list[_Open] = []
        self._nodes = 0
        self._documents = 0

    def take(self, event: yaml.Event) -> None:
        assert event.start_mark is not None, "events of a parsed text say where they stand"
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise _fatal(
                    self._document.file, line, "a second YAML document begins here", "Keep one document a file."
                )
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent | yaml.AliasEvent):
            self._nodes += 1
            if self._nodes > NODES_MAX:
                raise _fatal(self._document.file, line, f"more than {NODES_MAX} values", "Take out what is not needed.")
            self._node(event, line)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._stack.pop()

    def _node(self, event: yaml.NodeEvent, line: int) -> None:
        top = self._stack[-1] if self._stack else None
        if top is not None and isinstance(top.values, dict) and top.key is None:
            self._key(top, event, line)
            return
        path, discarded = self._next_path(top)
        if not discarded and path:
            line = min(line, self._document.places[path].line) if path in self._document.places else line
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event, path, line, discarded=discarded)
        elif isinstance(event, yaml.AliasEvent):
            value = None
            self._document.places[path] = Place(line, "(alias)", is_collection=True)
        else:
            value = self._open(event, path, line, discarded=discarded)
        if top is None:
            self._root(value, line)
        elif not discarded:
            if isinstance(top.values, dict):
                top.values[str(path[-1])] = value
            else:
                top.values.append(value)
        if not discarded:
            self._refuse_sharing(event, path)

    def _root(self, value: object, line: int) -> None:
        if not isinstance(value, dict):
            raise _fatal(
                self._document.file, line, "the file is not a mapping", "Start it with `engines:` and `models:`."
            )
        self._document.root = value

    def _next_path(self, top: _Open | None) -> tuple[KeyPath, bool]:
        """Where the coming value belongs, and whether it is read over."""
        if top is None:
            return (), False
        if isinstance(top.values, list):
            return (*top.path, len(top.values)), top.discarded
        assert top.key is not None
        path = (*top.path, top.key)
        discarded = top.discarded or top.next_discarded
        top.key, top.next_discarded = None, False
        return path, discarded

    def _key(self, top: _Open, event: yaml.NodeEvent, line: int) -> None:
        assert isinstance(top.values, dict)
        if not isinstance(event, yaml.ScalarEvent):
            raise _fatal(self._document.file, line, "a key is not a plain text", "Write keys as `name:`.")
        key = event.value
        top.key = key
        if top.discarded:
            return
        if "${" in key:
            key = self._expanded_key(top, key, line)
        path = (*top.path, key)
        top.key = key
        if event.anchor is not None or event.tag is not None:
            self._document.add(top.path, "a key has an anchor or a tag", "Write the key alone.", value=_A_MAPPING)
        if path in self._document.places:
            first = self._document.places[path].line
            self._document.problems.append(
                problem(
                    self._document.file,
                    line,
                    render(path),
                    "(second value)",
                    f"this key is already set on line {first}",
                    "Keep one of the two.",
                )
            )
            top.next_discarded = True
            return
        self._document.places[path] = Place(line, "")

    def _expanded_key(self, top: _Open, key: str, line: int) -> str:
        path = (*top.path, key)
        try:
            if not _NAMED_KEYS.fullmatch(render(top.path)):
                raise BadReference("a key cannot come from a variable", "Write the key itself.")
            return str(expand(key, self._environ))
        except BadReference as error:
            self._document.places.setdefault(path, Place(line, key))
            self._document.add(path, error.message, error.fix)
            del self._document.places[path]
            return key

    def _scalar(self, event: yaml.ScalarEvent, path: KeyPath, line: int, *, discarded: bool) -> object:
        if discarded:
            return None
        quote = event.style if event.style in ("'", '"') else ""
        self._document.places[path] = Place(line, f"{quote}{event.value}{quote}")
        try:
            text = expand(event.value, self._environ)
        except BadReference as error:
            self._document.add(path, error.message, error.fix)
            return event.value
        is_plain = event.style is None and text == event.value
        return plain(text) if is_plain else text

    def _open(self, event: yaml.NodeEvent, path: KeyPath, line: int, *, discarded: bool) -> object:
        if len(self._stack) >= DEPTH_MAX:
            raise _fatal(self._document.file, line, f"nested deeper than {DEPTH_MAX} levels", "Check the brackets.")
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        values: dict[str, Any] | list[Any] = {} if is_mapping else []
        if not discarded:
            self._document.places[path] = Place(line, _A_MAPPING if is_mapping else _A_LIST, is_collection=True)
        self._stack.append(_Open(path, values, discarded=discarded))
        return values

    def _refuse_sharing(self, event: yaml.NodeEvent, path: KeyPath) -> None:
        """Anchors, aliases and tags: a file that says each thing once, where it stands, needs none of them."""
        if isinstance(event, yaml.AliasEvent):
            self._document.add(path, "a value beginning with * is a YAML alias", "Write the value out, or quote it.")
        elif event.anchor is not None:
            self._document.add(path, "a value beginning with & is a YAML anchor", "Take it out, or quote the value.")
        elif getattr(event, "tag", None) is not None:
            self._document.add(path, "a value beginning with ! is a YAML tag", "Take it out, or quote the value.")


_A_MAPPING = "(a mapping)"
_A_LIST = "(a list)"
