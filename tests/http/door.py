"""A small app behind the router's HTTP protocol, without the router: for what happens before a request has a route."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from router.http.inbound import InboundProtocol
from tests.http.stack import until
from tests.http.wire import exchange

PLAIN_HEADERS = [(b"content-type", b"text/plain"), (b"content-length", b"2")]


class App:
    """Reads each request whole and says `ok`; keeps what it saw."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        self.headers = list(scope["headers"])
        self.body = b""
        while (message := await receive())["type"] == "http.request":
            self.body += message["body"]
            if not message["more_body"]:
                await send({"type": "http.response.start", "status": 200, "headers": PLAIN_HEADERS})
                await send({"type": "http.response.body", "body": b"ok"})
                return


class Held(App):
    """Answers when it may; `left` is set where its client leaves first."""

    def __init__(self) -> None:
        super().__init__()
        self.has_come = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        while (await receive())["more_body"]:
            pass
        self.has_come.set()
        leaving = asyncio.create_task(self._watch(receive))
        await self.may_answer.wait()
        leaving.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": PLAIN_HEADERS})
        await send({"type": "http.response.body", "body": b"ok"})

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()
        self.may_answer.set()


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, *, connections: int | None = None, **limits: Any) -> AsyncIterator[int]:
    """`app` behind the protocol with these limits; the port. Ends with every connection and call over."""
    kind = type("Limited", (InboundProtocol,), limits)
    config = uvicorn.Config(
        app, http=kind, ws="none", lifespan="off", log_config=None, access_log=False, limit_concurrency=connections
    )
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: kind(config, state, {}), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        await until(lambda: not state.connections and not state.tasks)


async def all_read(port: int) -> None:
    """Whatever was sent before is read: another connection, made and read after it, is answered."""
    await exchange(port, b"?")


def error_of(answer: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and error of the one answer on a connection."""
    assert answer.count(b"HTTP/1.1 ") == 1
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {name: value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    assert headers["content-length"] == str(len(body))
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"].startswith("req-")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(lines[0].split(" ")[1]), headers, error


def code_of(answer: bytes) -> tuple[int, str]:
    status, _, error = error_of(answer)
    return status, error["code"]
