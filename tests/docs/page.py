"""A page of the documents, read as its tests need it: headings, and the rows of tables."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")
#: A bar that does not part two cells: it is escaped.
_CELL = re.compile(r"(?<!\\)\|")

Row = tuple[str, ...]


def text(name: str) -> str:
    """The page `name` below the project's root."""
    return (ROOT / name).read_text()


def sections(name: str, level: int) -> dict[str, str]:
    """The text under each heading of `level`, by heading without its backticks, up to the next of the same level."""
    parts = re.split(rf"^{'#' * level} (.+)$", _FENCE.sub("", text(name)), flags=re.MULTILINE)
    headings = [heading.replace("`", "") for heading in parts[1::2]]
    assert len(headings) == len(set(headings)), f"{name} has a heading twice"
    return dict(zip(headings, parts[2::2], strict=True))


def rows(section: str) -> list[Row]:
    """The cells of every table row of `section`, table heads and rules left out."""
    found: list[Row] = []
    lines = section.splitlines()
    for number, line in enumerate(lines):
        is_rule = re.fullmatch(r"\|[-:| ]+\|", line)
        is_head = number + 1 < len(lines) and re.fullmatch(r"\|[-:| ]+\|", lines[number + 1])
        if line.startswith("|") and not is_rule and not is_head:
            found.append(tuple(cell.strip() for cell in _CELL.split(line)[1:-1]))
    return found


def codes(cell: str) -> list[str]:
    """What stands in backticks."""
    return _CODE.findall(cell)


def first_codes(section: str) -> list[str]:
    """What stands in backticks in the first cell of each row; a row may name several."""
    return [code for row in rows(section) for code in codes(row[0])]


def without_repeats(names: list[str]) -> set[str]:
    """`names` as a set; a name that is there twice is a fault of the page."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    assert repeated == []
    return set(names)
