"""Which header fields go to the other side and which come back.

Rules: hop-by-hop fields and those that `Connection` names stay on their own connection (RFC 9110, 7.6.1); the
client's credentials never reach an engine; a field that cannot be written is left out instead of failing the request.
Names are lower case; bytes above 0x7F pass as they are. It must never know what the fields mean beyond that.
"""

import re
from collections.abc import Iterable

from router.upstream.api import Headers

#: RFC 9110, 7.6.1 and the older names that RFC 2616, 13.5.1 lists.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

#: Hop-by-hop, set by the connection itself, or the client's secrets. `expect` was answered by our own server.
NEVER_SENT = HOP_BY_HOP | {
    b"accept-encoding",
    b"api-key",
    b"authorization",
    b"content-length",
    b"cookie",
    b"expect",
    b"host",
    b"x-api-key",
}

#: A connection is shared by many clients: what one answer sets must not stick to another client.
NEVER_RETURNED = HOP_BY_HOP | {b"set-cookie"}

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
#: All control characters but the tab.
_CONTROLS = bytes(set(range(32)) - {9}) + b"\x7f"
_VALUE = re.compile(b"[^" + re.escape(_CONTROLS) + b"]*")

#: By name, how a line with it begins. Bounded, because clients may make up names.
_BEGINS: dict[bytes, bytes] = {}
_BEGINS_MAX = 512


def own_headers(api_key: str | None) -> list[tuple[bytes, bytes]]:
    """What every request carries besides its own fields."""
    # Bytes are forwarded undecoded, so a compressed answer would reach clients that never asked for one.
    own = [(b"accept-encoding", b"identity")]
    if api_key:
        own.append((b"authorization", b"Bearer " + api_key.encode()))
    return own


def header_lines(headers: Headers) -> bytes:
    """The fields that may be sent, each as the line that is written, a line end before it."""
    lines: list[bytes] = []
    for name, value in headers:
        begin = _BEGINS.get(name)
        if begin is None:
            begin = _begin(name)
        if begin:
            lines.append(begin + value)
        elif name == b"connection":
            # It may name others.
            return _checked_lines(headers)
    joined = b"".join(lines)
    # One look at all of them; only where something odd is found, one at each.
    if len(joined.translate(None, _CONTROLS)) + 2 * len(lines) == len(joined):
        return joined
    return _checked_lines(headers)


def _begin(name: bytes) -> bytes:
    """What stands before a value of `name`; empty where `name` is not sent or no name."""
    begin = b"" if name in NEVER_SENT or not _NAME.fullmatch(name) else b"\r\n%b: " % name
    if len(_BEGINS) < _BEGINS_MAX:
        _BEGINS[name] = begin
    return begin


def _checked_lines(headers: Headers) -> bytes:
    return b"".join([b"\r\n%b: %b" % pair for pair in sendable(headers)])


def sendable(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The same as pairs."""
    dropped = NEVER_SENT | named_in_connection(value for name, value in headers if name == b"connection")
    return [
        pair for pair in headers if pair[0] not in dropped and _NAME.fullmatch(pair[0]) and _VALUE.fullmatch(pair[1])
    ]


def returned_headers(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The fields of an answer that may go on to a client."""
    pairs = [(name.lower(), value) for name, value in raw]
    dropped = NEVER_RETURNED | named_in_connection(value for name, value in pairs if name == b"connection")
    return [pair for pair in pairs if pair[0] not in dropped]


def named_in_connection(values: Iterable[bytes]) -> frozenset[bytes]:
    """The names, lower case, in values of `Connection`."""
    return frozenset(option.strip().lower() for value in values for option in value.split(b","))


def first(headers: Headers, name: bytes) -> bytes | None:
    """The first value of `name`, or None."""
    for key, value in headers:
        if key == name:
            return value
    return None
