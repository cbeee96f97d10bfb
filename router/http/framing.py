"""The head of a request as the connection reads it: its target, whether it may be served at all, and how it would be
without a wish for another protocol.

No upgrade is ever made (RFC 9110, 7.8 lets a server ignore the wish), but the parser takes what follows such a head for
the other protocol's and stops. So a new one reads the head again, without `upgrade`, and goes on with the body.
"""

import urllib.parse
from collections.abc import Iterable
from functools import lru_cache

import httptools

from router.errors import ApiError
from router.http import doorstep

#: What `split_target` raises.
NO_TARGET = (httptools.HttpParserInvalidURLError, UnicodeDecodeError)


@lru_cache(maxsize=64)
def split_target(target: bytes) -> tuple[str, bytes, bytes]:
    """The path of a request target, plain and as it came, and the query. There are few targets, and some 4 MiB of the
    longest at most. Raises: what ends as a malformed request, where it is none."""
    url = httptools.parse_url(target)
    raw_path: bytes = url.path or b"/"
    return urllib.parse.unquote(raw_path.decode("ascii")), raw_path, url.query or b""


def fault_of(version: str, hosts: int) -> ApiError | None:
    """What is wrong with a head of this version and so many `host` lines. Source: RFC 9112, 3.2."""
    if version not in ("1.0", "1.1"):
        return doorstep.malformed()
    return doorstep.no_host(hosts) if hosts > 1 or (version == "1.1" and not hosts) else None


def without_upgrade(method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head again; its `connection` still names the upgrade, which means nothing alone."""
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    lines.extend(b"%b: %b" % pair for pair in headers if pair[0] != b"upgrade")
    return b"\r\n".join([*lines, b"", b""])


def new_parser(protocol: object) -> httptools.HttpRequestParser:
    """As the base class of the connection makes it."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
