"""Loads the Lua operations that lie in `lua/`, each by its file name, each after the shared `_line.lua`."""

from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files

#: Every operation has a file of this name; `tests/queue` checks that the folder holds no other.
OPERATIONS = ("enqueue", "claim", "put_back", "leave", "ahead", "beat", "reap", "stats")


@dataclass(frozen=True, slots=True)
class Script:
    """One operation. `digest` is what EVALSHA takes: the SHA-1 of `source` in hex."""

    source: bytes
    digest: str


@cache
def script(operation: str) -> Script:
    """The script of one of `OPERATIONS`."""
    assert operation in OPERATIONS, operation
    folder = files("router.queue") / "lua"
    source = (folder / "_line.lua").read_bytes() + (folder / f"{operation}.lua").read_bytes()
    return Script(source, sha1(source, usedforsecurity=False).hexdigest())
