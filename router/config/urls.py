"""Base URLs of engines and relays, and whether one leads back to ourselves. Pure text: no name is looked up."""

import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?")


@dataclass(frozen=True, slots=True)
class BadUrl(Exception):
    """Neither text repeats a part of the URL that could be a credential."""

    message: str
    fix: str


@dataclass(frozen=True, slots=True)
class BaseUrl:
    """`text` has no slash at its end and no `/v1`: request paths, which begin with `/v1`, are appended to it."""

    text: str
    host: str
    port: int
    path: str

    @property
    def identity(self) -> tuple[str, int, str]:
        """Equal for two URLs that reach the same server."""
        return ("loopback" if is_loopback(self.host) else self.host, self.port, self.path)


def parse_base_url(url: str) -> BaseUrl:
    """What `url` names: `http://`, `https://`, or `unix:///path/of.sock` (vLLM's `--uds`). Raises: `BadUrl`."""
    if "://" not in url:
        example = f"http://{url}" if re.fullmatch(r"[A-Za-z0-9.:/\[\]_-]+", url) else "http://host:port"
        raise BadUrl("has no scheme", f"Write {example}.")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise BadUrl("has characters that cannot stand in a URL", "Write http://host:port.")
    if url.startswith("unix://"):
        path = url.removeprefix("unix://")
        if not path.startswith("/") or path.endswith("/"):
            raise BadUrl("has no path of a socket", "Write unix:///path/of.sock.")
        return BaseUrl(url, "", 0, path)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BadUrl("is not a URL", "Write http://host:port with a port of 1 to 65535.") from None
    if parts.scheme not in _PORTS:
        raise BadUrl("has a scheme that engines and relays do not speak", "Begin it with http://, https:// or unix://.")
    if "@" in parts.netloc:
        raise BadUrl("has credentials in it", "Take them out and set api_key.")
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise BadUrl("has a query or a fragment", "End it with the host, the port or a path.")
    if not parts.hostname or not is_host(parts.hostname) or port == 0:
        raise BadUrl("has no valid host and port", "Write http://host:port with a port of 1 to 65535.")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    host = parts.hostname.lower()
    return BaseUrl(f"{parts.scheme}://{parts.netloc}{path}", host, port or _PORTS[parts.scheme], path)


def is_host(host: str) -> bool:
    """Whether `host` is a name or an address, without port and brackets."""
    return _address(host) is not None or _HOST_NAME.fullmatch(host) is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    address = _address(host)
    return (
        address.is_loopback
        if address is not None
        else host.lower().rstrip(".") in {"localhost", "localhost.localdomain"}
    )


def leads_here(url: BaseUrl, listen_host: str, listen_port: int) -> bool:
    """Whether `url` is where the router itself listens, as far as names tell."""
    if url.port != listen_port:
        return False
    if url.host == listen_host.lower() or (is_loopback(url.host) and is_loopback(listen_host)):
        return True
    here, there = _address(listen_host), _address(url.host)
    listens_everywhere = here is not None and here.is_unspecified
    is_this_machine = is_loopback(url.host) or url.host == socket.gethostname().lower()
    is_unspecified = there is not None and there.is_unspecified
    return (listens_everywhere and (is_this_machine or is_unspecified)) or (is_unspecified and is_loopback(listen_host))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
