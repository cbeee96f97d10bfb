"""What of a request's header fields the router itself reads, collected once, before its route.

Rules: names come in lower case (ASGI). A field that is there more than once, with different values, is read as one with
commas between (RFC 9110, 5.3): where only one value makes sense, that is none. It must never know of keys or routes.
"""

import itertools
import re
import secrets
from collections.abc import Sequence

import msgspec

from router.config.model import KeyConfig

#: A client's own id is kept if it is safe in a header, a log line and an engine's id.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
#: Where a `Head` stands in the scope.
HEAD = "router.head"

#: What everybody may ask for where there are no keys.
MAY_SET_WITHOUT_KEYS = frozenset({"class"})


class Head(msgspec.Struct, frozen=True, gc=False):
    """Goes along in the scope. `key`: whose call it is, None where keys are not asked for; `may_set`: what this call
    may ask for; `fields`: header fields by name, those that are there more than once as `read_fields` has them."""

    request_id: str
    key: KeyConfig | None
    may_set: frozenset[str]
    fields: dict[bytes, bytes]

    def text(self, name: bytes) -> str | None:
        """A field's value (Latin-1, so every byte survives), None where it is not there."""
        value = self.fields.get(name)
        return None if value is None else value.decode("latin-1")


class RequestIds:
    """Ids of requests. `new`: unique over processes and restarts, a random beginning, then a count; they are no
    secret."""

    def __init__(self) -> None:
        self.new = map(("req-" + secrets.token_hex(8) + "{:06x}").format, itertools.count(1))

    def of(self, given: bytes) -> str:
        """The client's own id if it may be kept, else a new one."""
        return given.decode() if _REQUEST_ID.fullmatch(given) else next(self.new)


def read_fields(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Header fields by name, where some are there more than once."""
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        before = fields.setdefault(name, value)
        if before != value:
            fields[name] = before + b", " + value
    return fields


def presented_key(fields: dict[bytes, bytes]) -> bytes | None:
    """The key that a client presents: a bearer token, or Anthropic's header. None for none, or two different ones."""
    bearer, plain = fields.get(b"authorization"), fields.get(b"x-api-key")
    if bearer is None:
        return plain.strip() if plain is not None else None
    kind, _, token = bearer.strip().partition(b" ")
    if kind != b"Bearer" and kind.lower() != b"bearer":
        return None
    token = token.strip()
    return token if plain is None or plain.strip() == token else None
