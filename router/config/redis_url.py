"""Reads the address of the queue's Redis: pure text in, a frozen value or a sentence out.

Accepted:
 - `redis://[user:password@]host[:port][/db]`, `rediss://` for TLS;
 - `unix:///path/to/socket[?db=N]` (`unix://user:password@/path` with credentials);
 - `redis+sentinel://[user:password@]host[:port][,host[:port]...]/master_name[/db]`, `rediss+sentinel://` for TLS;
 - `redis+cluster://[user:password@]host[:port][,host[:port]...]`, `rediss+cluster://` for TLS.

User, password, path and master name are percent-decoded. No error text repeats any part of the URL that could hold a
password, so every message is safe to print. This module never opens a connection and knows no Redis client.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote

from router.config.model import Secret

_SCHEMES = "redis, rediss, unix, redis+sentinel, rediss+sentinel, redis+cluster, rediss+cluster"
_HOST = re.compile(r"^(?:\[(?P<ipv6>[0-9A-Fa-f:.%]+)\]|(?P<name>[^\s:\[\]@/]+))(?::(?P<port>[0-9]{1,5}))?$")
_REDIS_PORT = 6379
_SENTINEL_PORT = 26379
#: Redis accepts a database number up to `databases - 1`; no server in the field sets more than this.
_DB_MAX = 65_535
_TLS_OPTIONS = frozenset({"tls_ca_file", "tls_cert_file", "tls_key_file", "tls_verify"})
_SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})


class RedisKind(StrEnum):
    """How the server is found."""

    DIRECT = "direct"
    UNIX = "unix"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisTls:
    """TLS as the URL asks for it. Empty strings mean: the system's trust store, no client certificate."""

    verify: bool = True
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """One parsed URL. `hosts` is empty for `unix`, where `path` is set; `master_name` is set for `sentinel` only.

    The credentials are the data servers'; sentinels have their own, from `?sentinel_username=` and
    `?sentinel_password=`, because most sentinels run without any and refuse an AUTH that they did not ask for.
    """

    kind: RedisKind
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    master_name: str = ""
    db: int = 0
    username: str | None = None
    password: Secret | None = None
    sentinel_username: str | None = None
    sentinel_password: Secret | None = None
    tls: RedisTls | None = None


def parse(url: str) -> RedisUrl:
    """The address that `url` names.

    Raises:
        ValueError: with what is wrong and what to write instead; never with a part that may hold a password.
    """
    scheme, separator, rest = url.strip().partition("://")
    kind, is_tls = _kind(scheme.lower() if separator else "")
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in rest):
        raise ValueError("the Redis URL holds a control character; percent-encode it or take it out")
    if "#" in rest:
        raise ValueError("the Redis URL holds a '#'; write it as %23 (special characters of a password are encoded)")
    body, _, query = rest.partition("?")
    authority, slash, path = body.partition("/")
    if "@" in query or ("@" in path and kind is not RedisKind.UNIX):
        raise ValueError(
            "the Redis URL has an '@' behind a '/' or '?'; percent-encode special characters of a password: "
            "/ as %2F, ? as %3F, @ as %40"
        )
    options = _options(query, kind, is_tls=is_tls)
    credentials, at, hosts_text = authority.rpartition("@")
    username, password = _credentials(unquoted=credentials) if at else (None, None)
    if kind is RedisKind.UNIX:
        if hosts_text or not slash:
            raise ValueError("unix:// takes an absolute socket path, such as unix:///run/valkey/valkey.sock")
        path = slash + path
    db, master_name, socket_path = _path(kind, path, options)
    return RedisUrl(
        kind=kind,
        hosts=() if kind is RedisKind.UNIX else _hosts(hosts_text, kind),
        path=socket_path,
        master_name=master_name,
        db=db,
        username=username,
        password=password,
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=_secret(options.get("sentinel_password")),
        tls=_tls(options) if is_tls else None,
    )


def _kind(scheme: str) -> tuple[RedisKind, bool]:
    kinds = {
        "redis": (RedisKind.DIRECT, False),
        "rediss": (RedisKind.DIRECT, True),
        "unix": (RedisKind.UNIX, False),
        "redis+sentinel": (RedisKind.SENTINEL, False),
        "rediss+sentinel": (RedisKind.SENTINEL, True),
        "redis+cluster": (RedisKind.CLUSTER, False),
        "rediss+cluster": (RedisKind.CLUSTER, True),
    }
    if scheme not in kinds:
        raise ValueError(f"the Redis URL must begin with one of {_SCHEMES}, followed by '://'")
    return kinds[scheme]


def _credentials(*, unquoted: str) -> tuple[str | None, Secret | None]:
    """User and password of `user:password` or `:password`; both percent-decoded."""
    user, colon, password = unquoted.partition(":")
    if not colon or not password:
        raise ValueError("the Redis URL has a user without a password; write user:password@ or :password@")
    return unquote(user) or None, Secret(unquote(password))


def _hosts(text: str, kind: RedisKind) -> tuple[tuple[str, int], ...]:
    parts = text.split(",")
    if kind is RedisKind.DIRECT and len(parts) > 1:
        raise ValueError("redis:// takes one host; use redis+sentinel:// or redis+cluster:// for several")
    default_port = _SENTINEL_PORT if kind is RedisKind.SENTINEL else _REDIS_PORT
    hosts: list[tuple[str, int]] = []
    for number, part in enumerate(parts, start=1):
        match = _HOST.match(part)
        port = int(match["port"] or default_port) if match else 0
        if match is None or not 1 <= port <= 65_535:
            raise ValueError(
                f"host number {number} of the Redis URL is not host or host:port with a port of 1 to 65535; "
                "percent-encode '/', '@', '?' and '#' in a password, put an IPv6 address in brackets"
            )
        hosts.append((match["ipv6"] or match["name"], port))
    if len(set(hosts)) != len(hosts):
        raise ValueError("the Redis URL names one host twice")
    return tuple(hosts)


def _path(kind: RedisKind, path: str, options: dict[str, str]) -> tuple[int, str, str]:
    """Database, master name and socket path."""
    if kind is RedisKind.UNIX:
        return _db(options.get("db", "")), "", unquote(path)
    parts = path.split("/") if path else []
    if kind is RedisKind.CLUSTER:
        if parts not in ([], ["0"]):
            raise ValueError("a Redis Cluster has database 0 only; take the path off the URL")
        return 0, "", ""
    if kind is RedisKind.SENTINEL:
        if not parts or not parts[0] or len(parts) > 2:
            raise ValueError("redis+sentinel:// needs the master's name: redis+sentinel://host:port/master_name[/db]")
        return _db(parts[1] if len(parts) == 2 else ""), unquote(parts[0]), ""
    if len(parts) > 1:
        raise ValueError("the path of a Redis URL is the database number only, such as redis://host:6379/0")
    return _db(parts[0] if parts else ""), "", ""


def _db(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 5 or int(text) > _DB_MAX:
        raise ValueError(f"the database of a Redis URL is a number of 0 to {_DB_MAX}")
    return int(text)


def _options(query: str, kind: RedisKind, *, is_tls: bool) -> dict[str, str]:
    allowed = set(_TLS_OPTIONS if is_tls else ())
    if kind is RedisKind.SENTINEL:
        allowed |= _SENTINEL_OPTIONS
    if kind is RedisKind.UNIX:
        allowed.add("db")
    options: dict[str, str] = {}
    for pair in query.split("&") if query else []:
        name, _, value = pair.partition("=")
        if name not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            raise ValueError(f"an option of the Redis URL is unknown here; allowed after '?': {known}")
        if name in options or not value:
            raise ValueError(f"the option {name} of the Redis URL must be given once, with a value")
        options[name] = unquote(value)
    if "sentinel_username" in options and "sentinel_password" not in options:
        raise ValueError("sentinel_username needs sentinel_password beside it")
    return options


def _tls(options: dict[str, str]) -> RedisTls:
    verify = options.get("tls_verify", "true")
    if verify not in ("true", "false"):
        raise ValueError("tls_verify is true or false")
    if "tls_key_file" in options and "tls_cert_file" not in options:
        raise ValueError("tls_key_file needs tls_cert_file beside it")
    return RedisTls(
        verify=verify == "true",
        ca_file=options.get("tls_ca_file", ""),
        cert_file=options.get("tls_cert_file", ""),
        key_file=options.get("tls_key_file", ""),
    )


def _secret(text: str | None) -> Secret | None:
    return None if text is None else Secret(text)
