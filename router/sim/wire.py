"""The sockets under the simulated server: listening, refusing, resetting, and dying at once.

uvicorn's HTTP protocol speaks; this owns the listener and every connection, because faults need what an ASGI app cannot
reach: to stop listening and listen again, and to reset one connection in the middle of an answer.
"""

import asyncio
import socket
import struct
from collections.abc import MutableMapping
from email.utils import formatdate
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_TRANSPORT = "sim.transport"


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with the connection's transport in the scope."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("MutableMapping[str, Any]", self.scope)["extensions"] = {_TRANSPORT: self.transport}


async def drop_connection(scope: MutableMapping[str, Any], receive: Receive, *, reset: bool) -> None:
    """End the request's connection without (the rest of) an answer: by RST, or by FIN after what was written.

    Raises: `ConnectionAbortedError` where there is no socket (an in-memory transport): the app's server then fails.
    """
    transport = scope.get("extensions", {}).get(_TRANSPORT)
    if transport is None:
        raise ConnectionAbortedError("the simulated server ends this connection")
    if reset:
        _abort(transport)
    else:
        transport.close()
    while (await receive())["type"] != "http.disconnect":
        pass


def _abort(transport: asyncio.Transport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is not None and not transport.is_closing():
        # A zero linger makes the close a reset: the peer sees an error, not an end.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class Listener:
    """One listening address. `listen`, `refuse` and `aclose` may be called in any order, any number of times."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
        self._config.load()
        self._state = ServerState()
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode()), *self._config.encoded_headers]
        self._host = host
        self._server: asyncio.Server | None = None
        self.port = port

    @property
    def is_listening(self) -> bool:
        return self._server is not None

    async def listen(self) -> None:
        """Bind and accept; a port of 0 becomes the kernel's choice and stays. Raises: `OSError` if it is taken."""
        if self._server is not None:
            return
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, self._host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Stop listening and close what is idle; requests in flight go on, and their connections close after them."""
        self._stop()
        for connection in list(self._state.connections):
            connection.shutdown()

    def kill(self) -> None:
        """Stop listening and reset every connection."""
        self._stop()
        for connection in list(self._state.connections):
            if isinstance(connection, HttpToolsProtocol):
                _abort(connection.transport)

    async def aclose(self) -> None:
        """As `kill`, and wait for the requests to notice."""
        self.kill()
        while self._state.tasks:
            await asyncio.wait(set(self._state.tasks))

    def _connection(self) -> HttpToolsProtocol:
        return _Protocol(config=self._config, server_state=self._state, app_state={})

    def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
