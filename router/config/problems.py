"""What is wrong with a configuration, said so that it can be mended: where, what was found, why not, what to write.

Rules of the file: a problem prints on one line; it never holds a secret, nor what a variable was set to. Whoever
makes a `Problem` passes its value through `shown`.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path

#: From the document's root to a key or item: `("models", 0, "pools", "chat")`.
KeyPath = tuple[str | int, ...]

#: Keys whose value is a secret wherever they stand, the wrong place included. Matched inside the key, so that a
#: misspelt neighbour (`api_key_`, `apikey`) is covered as well.
_SECRET_KEY = re.compile(r"key(?!_prefix|s$)|secret|passw|token$|credential|proxy|auth", re.IGNORECASE)
_SCHEME = re.compile(r"['\"]?[A-Za-z][A-Za-z0-9+.-]*:")
_QUERY = re.compile(r"[?#].*", re.DOTALL)
_SHOWN_CHARS_MAX = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. `where` is the full key path (`models[0].pools.chat.max_num_seqs`) or the name of a command-line
    option, `line` counts from 1, `value` is what the file says there, `fix` what to do, as a whole sentence."""

    file: str
    line: int
    where: str
    value: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.where}: {self.value}: {self.message}. {self.fix}"

    def as_json(self) -> dict[str, object]:
        """The same, for `router check --json`."""
        return asdict(self)


class ConfigErrors(Exception):
    """The configuration cannot be used. `problems` holds all of them, in the order of the file; never empty."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def problem(file: Path, line: int, where: str, value: str, message: str, fix: str) -> Problem:
    """A `Problem` whose texts are held to one printable line each."""
    return Problem(
        file=one_line(str(file), 4096),
        line=line,
        where=one_line(where, 256),
        value=one_line(value),
        message=one_line(message, 1024),
        fix=one_line(fix, 1024),
    )


def render(path: KeyPath) -> str:
    """`("models", 0, "name")` as `models[0].name`; the root as `(file)`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text or "(file)"


def is_secret(path: KeyPath) -> bool:
    """Whether the value at `path` may be a secret, judged by its last key. The sections `keys` and `key_prefix` are
    not."""
    names = [part for part in path if isinstance(part, str)]
    return bool(names) and _SECRET_KEY.search(names[-1]) is not None


def shown(path: KeyPath, raw: str) -> str:
    """`raw`, the text in the file, as a problem may show it: secrets masked, credentials taken out of URLs."""
    if is_secret(path):
        return "***"
    if "//" in raw or path[-1:] == ("url",):
        return mask_url(raw)
    return raw


def mask_url(text: str) -> str:
    """`text`, a URL or what should be one, without user, password, query and fragment."""
    scheme, slashes, rest = text.partition("//")
    if not slashes:
        scheme, rest = "", text
    elif not _SCHEME.fullmatch(scheme):
        return "***"
    before, at, host = rest.rpartition("@")
    kept = f"***@{host}" if at else before + host
    return scheme + slashes + _QUERY.sub("?***", kept)


def one_line(text: str, chars_max: int = _SHOWN_CHARS_MAX) -> str:
    """`text` cut to `chars_max`, with everything unprintable escaped."""
    cut = text if len(text) <= chars_max else text[:chars_max] + "..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in cut)
