"""Every link in the documents leads somewhere: to a file of the tree, and to a heading that it has."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.md")])

_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def _prose(page: Path) -> str:
    """The page without its code, in which brackets are not links and `#` begins no heading."""
    return re.sub(r"`[^`\n]*`", "`code`", _FENCE.sub("", page.read_text()))


def _anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them: a repeated heading gets a number."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", _FENCE.sub("", page.read_text()), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        number = 0
        while (numbered := f"{anchor}-{number}" if number else anchor) in anchors:
            number += 1
        anchors.add(numbered)
    return anchors


def _problem(page: Path, link: str) -> str | None:
    if re.match(r"[a-z][a-z0-9+.-]*:", link):
        return None
    path, _, anchor = unquote(link).partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return f"{link}: no such file"
    if anchor and target.suffix == ".md" and anchor not in _anchors(target):
        return f"{link}: no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_heading_that_exist(page: Path) -> None:
    links = [inline or reference for inline, reference in _LINK.findall(_prose(page))]

    problems = [problem for link in links if (problem := _problem(page, link))]

    assert problems == []
