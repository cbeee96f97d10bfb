"""Which header fields go to the other side and which come back.

Rules: hop-by-hop fields and those that `Connection` names stay on their own connection (RFC 9110, 7.6.1); the
client's credentials never reach an engine; a value that cannot be written is left out instead of failing the request.
Bytes above 0x7F pass as they are. It must never know what the fields mean beyond that.
"""

import re
from collections.abc import Iterable, Sequence

#: RFC 9110, 7.6.1 and the older names that RFC 2616, 13.5.1 lists.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

#: Set by the connection itself, or the client's secrets. `expect` was answered by our own server.
_NEVER_SENT = HOP_BY_HOP | {
    "accept-encoding",
    "api-key",
    "authorization",
    "content-length",
    "cookie",
    "expect",
    "host",
    "x-api-key",
}

#: A connection is shared by many clients: what one answer sets must not stick to another client.
_NEVER_RETURNED = HOP_BY_HOP | {"set-cookie"}

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_UNWRITABLE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def request_headers(headers: Sequence[tuple[str, str]], api_key: str | None) -> list[tuple[bytes, bytes]]:
    """The fields as they are written, `authorization` with our own key included, `host` and lengths not."""
    dropped = _NEVER_SENT | _named_in_connection(value for name, value in headers if name.lower() == "connection")
    # Bytes are forwarded undecoded, so a compressed answer would reach clients that never asked for one.
    written = [(b"accept-encoding", b"identity")]
    if api_key:
        written.append((b"authorization", b"Bearer " + api_key.encode()))
    for name, value in headers:
        pair = None if name.lower() in dropped else _written(name, value)
        if pair is not None:
            written.append(pair)
    return written


def response_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Lower-case names to values (Latin-1, so every byte survives); repeated fields are joined with a comma."""
    fields = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw]
    dropped = _NEVER_RETURNED | _named_in_connection(value for name, value in fields if name == "connection")
    headers: dict[str, str] = {}
    for name, value in fields:
        if name not in dropped:
            headers[name] = f"{headers[name]}, {value}" if name in headers and name != "content-length" else value
    return headers


def _named_in_connection(values: Iterable[str]) -> frozenset[str]:
    return frozenset(option.strip().lower() for value in values for option in value.split(","))


def _written(name: str, value: str) -> tuple[bytes, bytes] | None:
    try:
        pair = (name.encode("ascii"), value.encode("latin-1").strip(b" \t"))
    except UnicodeEncodeError:
        return None
    return pair if _NAME.fullmatch(pair[0]) and not _UNWRITABLE.search(pair[1]) else None
