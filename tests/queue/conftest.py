"""One store after another for the contract, one server after another for the faults."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import redis

from router.config.model import RedisConfig, Secret
from router.config.redis_url import parse
from router.queue.embedded import EmbeddedValkey
from router.queue.memory import MemoryQueue
from router.queue.open import open_queue
from router.queue.store import QueueStore
from tests.queue.servers import Server, queue_at, redis_binary, running, server_binaries

Story = Callable[[QueueStore], Awaitable[None]]
Tell = Callable[[Story], None]


class FixedClock:
    """Time that moves only when a test says so."""

    def __init__(self, now_s: float = 1_000.0) -> None:
        self.time_s = now_s

    def now_s(self) -> float:
        return self.time_s

    def unix_s(self) -> float:
        return self.time_s


def _tell_memory(story: Story) -> None:
    asyncio.run(_told(story, MemoryQueue(FixedClock())))


def _tell_embedded(story: Story, runner: asyncio.Runner, url: str) -> None:
    with redis.Redis(unix_socket_path=parse(url).path, protocol=2) as client:
        client.flushall()
    runner.run(_told(story, open_queue(RedisConfig(Secret("embedded"), "test", 5.0), url=url)))


def _tell_redis(story: Story, server: Server) -> None:
    server.call("FLUSHALL")
    asyncio.run(_told(story, queue_at(server.url)))


async def _told(story: Story, queue: QueueStore) -> None:
    try:
        await story(queue)
    finally:
        await queue.close()


_STORES = ["memory", "embedded", *(["redis7"] if redis_binary() else [])]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One Redis of the distribution for the whole run."""
    binary = redis_binary()
    assert binary is not None
    with running(binary, tmp_path_factory.mktemp("redis7")) as server:
        yield server


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, str]]:
    """One embedded Valkey for the whole run, with the event loop that owns it and its URL."""
    valkey = EmbeddedValkey(tmp_path_factory.mktemp("embedded"))
    with asyncio.Runner() as runner:
        try:
            yield runner, runner.run(valkey.start())
        finally:
            runner.run(valkey.stop())


@pytest.fixture(params=_STORES)
def tell(request: pytest.FixtureRequest) -> Tell:
    """Runs a story against an empty store."""
    if request.param == "memory":
        return _tell_memory
    if request.param == "embedded":
        runner, url = request.getfixturevalue("embedded")
        return lambda story: _tell_embedded(story, runner, url)
    server = request.getfixturevalue("redis_server")
    return lambda story: _tell_redis(story, server)


@pytest.fixture(params=list(server_binaries()))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A running server on a Unix socket."""
    with running(server_binaries()[request.param], tmp_path) as running_server:
        yield running_server
