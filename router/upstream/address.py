"""Where an engine listens, read from its URL, and how a connection to it is made. Of HTTP it knows only `Host`."""

import asyncio
import ssl
from collections.abc import Callable
from functools import cache
from urllib.parse import quote, urlsplit

#: Every printable ASCII character is left as it was written.
PATH_SAFE = "".join(chr(code) for code in range(0x21, 0x7F))


class Address:
    """Where an engine listens."""

    def __init__(self, name: str, base_url: str) -> None:
        """Raises: `ValueError`, which repeats nothing of a URL that may hold a password."""
        #: Goes before the path of every request.
        self.path = ""
        self.host_header = b"localhost"
        self._socket_path = ""
        self._host = ""
        self._port = 0
        self._tls: ssl.SSLContext | None = None
        if base_url.startswith("unix://"):
            self._socket_path = base_url.removeprefix("unix://")
            return
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError:
            raise ValueError(f"{name}: the URL cannot be read") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{name}: the URL must start with http://, https:// or unix:// and name a host")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError(f"{name}: the URL must be a plain base; give credentials as api_key")
        try:
            self._host = parts.hostname.encode("idna").decode()
        except UnicodeError:
            raise ValueError(f"{name}: the URL must name a host") from None
        self.path = quote(parts.path.rstrip("/"), safe=PATH_SAFE)
        # Made now: one made later, while no file can be opened, would know no authority, and be kept.
        self._tls = _tls() if parts.scheme == "https" else None
        self._port = port or (80 if self._tls is None else 443)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.host_header = (host if port is None else f"{host}:{port}").encode()

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> object:
        """Names are looked up anew for each connection, so an engine may move."""
        loop = asyncio.get_running_loop()
        if self._socket_path:
            return await loop.create_unix_connection(protocol, self._socket_path)
        if self._tls is not None:
            return await loop.create_connection(
                protocol, self._host, self._port, ssl=self._tls, server_hostname=self._host.rstrip(".")
            )
        return await loop.create_connection(protocol, self._host, self._port)


@cache
def _tls() -> ssl.SSLContext:
    """The system's authorities; loading them takes tens of milliseconds, so once, and not at all for plain HTTP."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
