"""What is known of a file: its values, the line each stands on, and everything that is wrong with it.

Rules of the file: the place of a problem is always a key path; how it is shown, and what must not be, is decided here
and in `problems.py`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.config.problems import KeyPath, Problem, problem, render, shown


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands. Lines count from 1. `raw` is the scalar's text before expansion, or what kind of
    collection it is."""

    line: int
    raw: str
    is_collection: bool = False


@dataclass(slots=True)
class Document:
    """The tree (`root`), where its parts stand, and what is known to be wrong with it.

    `bad` holds the paths whose value cannot be trusted; no further fault is looked for there.
    """

    file: Path
    root: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)
    bad: set[KeyPath] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    #: Paths that a command-line option replaced, with the option's name.
    options: dict[KeyPath, str] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int:
        """The line of `path`, or of the nearest thing around it."""
        for length in range(len(path), -1, -1):
            place = self.places.get(path[:length])
            if place is not None:
                return place.line
        return 1

    def value(self, path: KeyPath) -> str:
        """What the file says at `path`, fit to be shown."""
        if path in self.options:
            return shown(path, str(self.get(path)))
        place = self.places.get(path)
        if place is None:
            return "(not set)"
        return place.raw if place.is_collection else shown(path, place.raw)

    def get(self, path: KeyPath) -> Any:
        """The value at `path`, None where there is none."""
        here: Any = self.root
        for part in path:
            if isinstance(here, dict):
                here = here.get(part)
            elif isinstance(here, list) and isinstance(part, int) and part < len(here):
                here = here[part]
            else:
                return None
        return here

    def add(self, path: KeyPath, message: str, fix: str, *, value: str | None = None) -> None:
        """Note a problem at `path`; the value there is not trusted any more."""
        where = self.options.get(path, render(path))
        value = self.value(path) if value is None else value
        self.problems.append(problem(self.file, self.line(path), where, value, message, fix))
        self.bad.add(path)

    def note(self, path: KeyPath, message: str, fix: str, *, depends: Iterable[KeyPath] = ()) -> None:
        """Note a broken rule at `path`, unless that or something it `depends` on is bad itself."""
        if self.is_bad(path) or any(map(self.is_bad, depends)):
            return
        where = self.options.get(path, render(path))
        self.problems.append(problem(self.file, self.line(path), where, self.value(path), message, fix))

    def has_bad_below(self, path: KeyPath) -> bool:
        """Whether something inside `path` was found to be wrong."""
        return any(len(bad) > len(path) and bad[: len(path)] == path for bad in self.bad)

    def any_bad(self, places: re.Pattern[str]) -> bool:
        """Whether a bad path, as rendered, is one of `places` in full."""
        return any(places.fullmatch(render(path)) for path in self.bad)

    def is_bad(self, path: KeyPath) -> bool:
        """Whether `path`, or something around it, was found to be wrong."""
        return any(path[:length] in self.bad for length in range(len(path) + 1))
