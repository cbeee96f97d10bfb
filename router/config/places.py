"""Where each key belongs: the nearest known name for a misspelt one, the right place for a misplaced one."""

import difflib
import re
from dataclasses import dataclass
from functools import cache

from router.config.problems import KeyPath, render
from router.config.schema import File
from router.config.section import settings

#: Longer keys are nobody's typing error, and comparing them would take long.
_COMPARED_CHARS_MAX = 64
_SHOWN_PLACES_MAX = 3


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do with an unknown key, and the paths it was probably meant for."""

    fix: str
    meant: tuple[KeyPath, ...]


def advise(path: KeyPath) -> Advice:
    """What to say of the unknown key at `path`."""
    key, place = str(path[-1]), path[:-1]
    known = _known()
    here = known.get(pattern(place), ())
    elsewhere = [_nearest_path(place, other) for other, names in known.items() if key in names]
    is_short = len(key) <= _COMPARED_CHARS_MAX
    close = difflib.get_close_matches(key, here, n=1, cutoff=0.8 if elsewhere else 0.6) if is_short else []
    meant = tuple((*place, name) for name in close)
    near = f"Did you mean {render(meant[0])}?" if meant else ""
    if elsewhere:
        elsewhere.sort(key=lambda other: (-_shared(place, other), render(other)))
        most = _shared(place, elsewhere[0])
        nearest = [other for other in elsewhere if _shared(place, other) == most][:_SHOWN_PLACES_MAX]
        places = " or ".join(render(other) if other else "the top level" for other in nearest)
        fix = f"{near} A key of this name belongs in {places}." if near else f"It belongs in {places}: move it there."
        return Advice(fix, (*meant, *((*other, key) for other in nearest)))
    if near:
        return Advice(near, meant)
    return Advice(f"Known here: {', '.join(sorted(here))}.", ())


def pattern(path: KeyPath) -> str:
    """`models[0].pools` as `models[].pools`."""
    return re.sub(r"\[\d+\]", "[]", render(path)) if path else ""


@cache
def _known() -> dict[str, tuple[str, ...]]:
    """Place pattern to the names of its settings, the outermost first."""
    known: dict[str, list[str]] = {}
    for place, name, _section in settings(File):
        known.setdefault(place, []).append(name)
    return {place: tuple(names) for place, names in known.items()}


def _nearest_path(place: KeyPath, other: str) -> KeyPath:
    """The place of pattern `other` that lies nearest to `place`: the same list items as far as the two agree."""
    parts: list[str | int] = []
    agrees = True
    for step in filter(None, other.split(".")):
        name = step.removesuffix("[]")
        agrees = agrees and place[len(parts) : len(parts) + 1] == (name,)
        parts.append(name)
        if step != name:
            index = place[len(parts)] if agrees and len(place) > len(parts) else 0
            parts.append(index if isinstance(index, int) else 0)
    return tuple(parts)


def _shared(place: KeyPath, other: KeyPath) -> int:
    length = 0
    while length < min(len(place), len(other)) and place[length] == other[length]:
        length += 1
    return length
