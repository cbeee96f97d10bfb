"""Carries one command to Redis and its reply back, over a bounded set of connections.

Rules:
 - a connection carries one command at a time; whatever ends a call between send and reply (cancel, timeout, a broken
   socket) ends the connection too, so no reply is ever read by the next caller;
 - nothing is sent twice, save where the server says that it did not run it (a cluster's MOVED);
 - an idle connection that was closed or holds unread bytes is replaced before use, not after a failure;
 - after a read-only reply every connection made before is dropped: the address may lead to a new primary now.

It raises redis-py's exceptions and `OSError`; `router/queue/redis.py` translates them. It sets no deadline of its own
for a whole call, only `step_s` for a connect, a write or a read. It knows nothing of tickets.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from router.config.model import Secret
from router.config.redis_url import RedisKind, RedisTls, RedisUrl
from router.queue.failure import code_of

#: What a command is made of, and what RESP2 answers: bytes, int, None or a list of these (INFO: a dict in a cluster).
Argument = bytes | str | int
Reply = Any

_Dial = Callable[[], Awaitable[AbstractConnection]]


class Link(Protocol):
    """A way to one store."""

    async def call(self, *command: Argument) -> Reply:
        """The reply to a command that names a key (or a script with declared keys)."""
        ...

    async def call_all(self, *command: Argument) -> Sequence[Reply]:
        """The replies of every primary to a command without keys."""
        ...

    async def close(self) -> None:
        """End every connection; calls in flight fail. Idempotent."""
        ...


def open_link(url: RedisUrl, *, connections_max: int, timeout_s: float) -> Link:
    """The link to one server or to the primary behind Sentinel (`cluster.py` has the third kind); not yet connected.

    `timeout_s` is the caller's deadline for a whole call. With several sentinels a step gets its fraction, so that a
    dead one leaves time for the next.
    """
    if url.kind is RedisKind.SENTINEL:
        dialer = _SentinelDialer(url, timeout_s / (len(url.hosts) + 1))
        return PooledLink(dialer.dial, connections_max=connections_max)
    return PooledLink(lambda: dial_server(url, timeout_s), connections_max=connections_max)


class PooledLink:
    """One server, or the primary that sentinels name. At most `connections_max` connections; further calls wait."""

    def __init__(self, dial: _Dial, *, connections_max: int) -> None:
        self._dial = dial
        self._permits = asyncio.Semaphore(connections_max)
        self._idle: list[tuple[int, AbstractConnection]] = []
        self._busy: set[AbstractConnection] = set()
        self._generation = 0
        self._closed = False

    async def call(self, *command: Argument) -> Reply:
        async with self._permits:
            generation, connection = await self._take()
            self._busy.add(connection)
            reusable = False
            try:
                await connection.send_command(*command)
                reply = await connection.read_response()
                reusable = True
            except ResponseError as error:
                # The reply was read to its end, so the connection is clean.
                reusable = True
                if code_of(error) == "READONLY":
                    self._generation += 1
                raise
            finally:
                self._busy.discard(connection)
                if reusable and generation == self._generation and not self._closed:
                    self._idle.append((generation, connection))
                else:
                    await _drop(connection)
            return reply

    async def call_all(self, *command: Argument) -> Sequence[Reply]:
        return [await self.call(*command)]

    async def close(self) -> None:
        self._closed = True
        connections = [connection for _, connection in self._idle]
        connections.extend(self._busy)
        self._idle.clear()
        for connection in connections:
            await _drop(connection)
        # A transport gives its socket back one turn of the loop after it was closed.
        await asyncio.sleep(0)

    async def _take(self) -> tuple[int, AbstractConnection]:
        if self._closed:
            raise RedisConnectionError("the link is closed")
        while self._idle:
            generation, connection = self._idle.pop()
            try:
                stale = generation != self._generation or await connection.can_read()
            except (RedisError, OSError):
                stale = True
            if not stale:
                return generation, connection
            await _drop(connection)
        generation = self._generation
        return generation, await self._dial()


class _SentinelDialer:
    """Connects to the primary that the first answering sentinel names; that sentinel is asked first next time."""

    def __init__(self, url: RedisUrl, step_s: float) -> None:
        self._url = url
        self._step_s = step_s
        self._sentinels = list(url.hosts)

    async def dial(self) -> AbstractConnection:
        for sentinel in tuple(self._sentinels):
            try:
                address = await self._ask(sentinel)
            except (RedisError, OSError):
                continue
            if address is not None:
                self._sentinels.remove(sentinel)
                self._sentinels.insert(0, sentinel)
                return await dial_server(self._url, self._step_s, address)
        raise RedisConnectionError("no sentinel names a primary")

    async def _ask(self, sentinel: tuple[str, int]) -> tuple[str, int] | None:
        url = self._url
        connection = await _connected(
            _tcp_connection(sentinel, url.sentinel_username, _revealed(url.sentinel_password), 0, url.tls, self._step_s)
        )
        try:
            await connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", url.master_name)
            reply = await connection.read_response()
        finally:
            await _drop(connection)
        return None if reply is None else (reply[0].decode(), int(reply[1]))


async def dial_server(url: RedisUrl, step_s: float, address: tuple[str, int] | None = None) -> AbstractConnection:
    """A ready connection with the URL's credentials, to its first host or to `address`."""
    password = _revealed(url.password)
    if url.kind is RedisKind.UNIX:
        unix = UnixDomainSocketConnection(
            path=url.path, username=url.username, password=password, db=url.db, **_options(step_s)
        )
        return await _connected(unix)
    return await _connected(_tcp_connection(address or url.hosts[0], url.username, password, url.db, url.tls, step_s))


def _tcp_connection(
    address: tuple[str, int],
    username: str | None,
    password: str | None,
    db: int,
    tls: RedisTls | None,
    step_s: float,
) -> AbstractConnection:
    host, port = address
    kind = Connection if tls is None else SSLConnection
    return kind(
        host=host,
        port=port,
        username=username,
        password=password,
        db=db,
        **_tls_options(tls),
        **_options(step_s),
    )


def _options(step_s: float) -> dict[str, Any]:
    """RESP2 has no pushes, so a reply is always the answer to the last command. No retry, no library banner."""
    return {
        "socket_timeout": step_s,
        "socket_connect_timeout": step_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "driver_info": None,
    }


def _tls_options(tls: RedisTls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_cert_reqs": "required" if tls.verify else "none",
        "ssl_check_hostname": tls.verify,
        "ssl_ca_certs": tls.ca_file or None,
        "ssl_certfile": tls.cert_file or None,
        "ssl_keyfile": tls.key_file or None,
    }


async def _connected(connection: AbstractConnection) -> AbstractConnection:
    try:
        await connection.connect()  # type: ignore[no-untyped-call]  # redis-py leaves this method unannotated
    except BaseException:
        await _drop(connection)
        raise
    return connection


async def _drop(connection: AbstractConnection) -> None:
    """Close now. It does not suspend: with `nowait` redis-py closes the transport and waits for nothing."""
    await connection.disconnect(nowait=True)


def _revealed(secret: Secret | None) -> str | None:
    return None if secret is None else secret.reveal()
