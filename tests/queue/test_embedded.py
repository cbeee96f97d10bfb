"""The embedded Valkey: private, durable, one a directory, and gone when its router is."""

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import redis

from router.config.redis_url import parse
from router.queue.data_dir import lock_holder
from router.queue.embedded import DataDirInUse, EmbeddedValkey, ValkeyFailed
from router.queue.store import Enqueued, Ticket
from tests.queue.servers import queue_at, valkey_binary, wait_until

_MODEL = "model"
_LAUNCHER = Path(sys.modules[EmbeddedValkey.__module__].__file__ or "").with_name("launch.py")

#: A router in miniature: starts the server, takes three tickets, says so, and waits for its end.
_ROUTER = """
import asyncio, sys
from pathlib import Path
from router.queue.data_dir import lock_holder
from router.queue.embedded import EmbeddedValkey
from router.queue.store import Ticket
from tests.queue.servers import queue_at

async def main():
    valkey = EmbeddedValkey(Path(sys.argv[1]))
    queue = queue_at(await valkey.start())
    for number in range(3):
        await queue.enqueue("model", Ticket(f"t{number}", "me", 10), max_requests=9, max_tokens=99)
    print(lock_holder(Path(sys.argv[1]) / "server.lock"), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def _run(directory: Path, story: Callable[[EmbeddedValkey], Awaitable[None]]) -> None:
    async def main() -> None:
        valkey = EmbeddedValkey(directory)
        try:
            await story(valkey)
        finally:
            await valkey.stop()

    asyncio.run(main())


def _server_pid(directory: Path) -> int:
    """The process id of the server that runs on `directory`."""
    pid = lock_holder(directory / "server.lock")
    assert pid
    return pid


@contextlib.contextmanager
def _other_router(directory: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process with an embedded server on `directory`, and that server's process id."""
    router = subprocess.Popen(
        [sys.executable, "-c", _ROUTER, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert router.stdout is not None
        yield router, int(router.stdout.readline())
    finally:
        router.kill()
        router.communicate()


def _launch(directory: Path) -> subprocess.Popen[bytes]:
    """A server on `directory` that no `EmbeddedValkey` knows of; it listens when this returns."""
    server = subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), str(directory / "server.lock")),
            *(valkey_binary(), "--port", "0", "--unixsocket", str(directory / "valkey.sock")),
            *("--dir", str(directory), "--appendonly", "yes", "--appendfsync", "always"),
        ],
        stdout=subprocess.DEVNULL,
    )
    wait_until((directory / "valkey.sock").exists)
    return server


def _is_running(pid: int) -> bool:
    """A process that nobody has reaped yet has ended all the same."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _setting(url: str, name: str) -> str:
    with redis.Redis(unix_socket_path=parse(url).path, protocol=2, decode_responses=True) as client:
        return str(client.config_get(name)[name])


def test_it_is_durable_private_and_never_evicts(tmp_path: Path) -> None:
    async def story(valkey: EmbeddedValkey) -> None:
        url = await valkey.start()

        settings = {
            name: _setting(url, name) for name in ("port", "appendonly", "appendfsync", "maxmemory-policy", "save")
        }

        assert settings == {
            "port": "0",
            "appendonly": "yes",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
            "save": "",
        }
        assert stat.S_IMODE(Path(parse(url).path).stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "new" / "data dir").stat().st_mode) == 0o700
        assert (tmp_path / "new" / "data dir" / "valkey.log").exists()

    _run(tmp_path / "new" / "data dir", story)


def test_a_data_directory_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    async def story(valkey: EmbeddedValkey) -> None:
        tmp_path.chmod(0o755)

        await valkey.start()

        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700

    _run(tmp_path, story)


def test_tickets_outlive_a_router_that_is_killed_and_its_server_does_not(tmp_path: Path) -> None:
    with _other_router(tmp_path) as (router, server_pid):
        assert _is_running(server_pid)
        router.send_signal(signal.SIGKILL)
        router.wait()
        wait_until(lambda: not _is_running(server_pid))

    async def story(valkey: EmbeddedValkey) -> None:
        queue = queue_at(await valkey.start())
        claimed = [await queue.claim(_MODEL, "me", max_tokens=10) for _ in range(4)]
        await queue.close()

        assert [ticket and ticket.id for ticket in claimed] == ["t0", "t1", "t2", None]

    _run(tmp_path, story)


def test_a_second_router_on_a_live_directory_is_told_who_has_it(tmp_path: Path) -> None:
    async def story(valkey: EmbeddedValkey) -> None:
        with pytest.raises(DataDirInUse, match=rf"process id {router.pid}; stop that one, or give this one another"):
            await valkey.start()

        assert not valkey.is_alive

    with _other_router(tmp_path) as (router, server_pid):
        _run(tmp_path, story)
        assert _is_running(server_pid)


def test_a_second_start_in_one_process_is_told_so_too_until_the_first_has_stopped(tmp_path: Path) -> None:
    async def story(valkey: EmbeddedValkey) -> None:
        await valkey.start()
        second = EmbeddedValkey(tmp_path)
        with pytest.raises(DataDirInUse, match=str(os.getpid())):
            await second.start()
        await second.stop()
        assert valkey.is_alive

        await valkey.stop()

        await second.start()
        await second.stop()

    _run(tmp_path, story)


def test_a_server_that_outlived_its_router_is_ended_before_the_next_begins(tmp_path: Path) -> None:
    # As where the kernel ties no child to its parent: this process is the parent, and lives.
    orphan = _launch(tmp_path)

    async def story(valkey: EmbeddedValkey) -> None:
        queue = queue_at(f"unix://{tmp_path}/valkey.sock")
        answer = await queue.enqueue(_MODEL, Ticket("one", "me", 10), max_requests=9, max_tokens=99)
        await queue.close()
        assert isinstance(answer, Enqueued)

        queue = queue_at(await valkey.start())

        assert orphan.wait() == 0
        assert await queue.claim(_MODEL, "me", max_tokens=10) == answer.ticket
        await queue.close()

    _run(tmp_path, story)


def test_a_launcher_whose_router_is_gone_starts_nothing(tmp_path: Path) -> None:
    launched = subprocess.run(
        [sys.executable, "-I", "-S", str(_LAUNCHER), "1", str(tmp_path / "server.lock"), "/bin/false"], check=False
    )

    assert launched.returncode == 75
    assert not (tmp_path / "server.lock").exists()


def test_a_launcher_that_finds_a_live_server_starts_nothing(tmp_path: Path) -> None:
    async def story(valkey: EmbeddedValkey) -> None:
        await valkey.start()
        before = _server_pid(tmp_path)

        launched = subprocess.run(
            [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), tmp_path / "server.lock", "/bin/false"],
            check=False,
        )

        assert launched.returncode == 73
        assert _server_pid(tmp_path) == before

    _run(tmp_path, story)


def test_a_stale_socket_file_is_in_nobody_s_way(tmp_path: Path) -> None:
    (tmp_path / "valkey.sock").write_text("left behind")

    async def story(valkey: EmbeddedValkey) -> None:
        queue = queue_at(await valkey.start())
        await queue.ping()
        await queue.close()

    _run(tmp_path, story)

    assert not (tmp_path / "valkey.sock").exists()


def test_a_path_too_long_for_a_socket_gets_a_short_private_one(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)

    async def story(valkey: EmbeddedValkey) -> None:
        queue = queue_at(await valkey.start())
        await queue.ping()
        await queue.close()
        path = Path(parse(valkey.url).path)
        assert len(str(path)) <= 107
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

        await valkey.stop()

        assert not path.parent.exists()

    _run(deep, story)


def test_a_short_place_that_another_made_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)

    async def story(valkey: EmbeddedValkey) -> None:
        place = Path(parse(valkey.url).path).parent
        place.mkdir(mode=0o755)
        try:
            with pytest.raises(ValkeyFailed, match="mode 700"):
                await valkey.start()
        finally:
            place.rmdir()
        await valkey.start()

    _run(deep, story)


def test_a_server_that_dies_is_noticed_and_can_be_started_again_with_what_it_held(tmp_path: Path) -> None:
    async def story(valkey: EmbeddedValkey) -> None:
        url = await valkey.start()
        queue = queue_at(url)
        await queue.enqueue(_MODEL, Ticket("one", "me", 10), max_requests=9, max_tokens=99)
        os.kill(_server_pid(tmp_path), signal.SIGKILL)

        assert await valkey.wait() == -signal.SIGKILL
        assert not valkey.is_alive
        assert lock_holder(tmp_path / "server.lock") is None
        assert await valkey.start() == url

        assert (await queue.stats(_MODEL)).requests == 1
        await queue.close()

    _run(tmp_path, story)


def test_starting_and_stopping_twice_changes_nothing(tmp_path: Path) -> None:
    async def story(valkey: EmbeddedValkey) -> None:
        await valkey.stop()
        await valkey.start()
        pid = _server_pid(tmp_path)
        await asyncio.gather(valkey.start(), valkey.start())
        assert _server_pid(tmp_path) == pid

        await asyncio.gather(valkey.stop(), valkey.stop())

        assert not valkey.is_alive
        assert await valkey.wait() == 0
        assert not (tmp_path / "valkey.sock").exists()

    _run(tmp_path, story)


def test_a_server_that_does_not_end_politely_is_ended(tmp_path: Path) -> None:
    async def main() -> None:
        valkey = EmbeddedValkey(tmp_path, stop_timeout_s=0.1)
        await valkey.start()
        os.kill(_server_pid(tmp_path), signal.SIGSTOP)

        await valkey.stop()

        assert await valkey.wait() == -signal.SIGKILL

    asyncio.run(main())


def test_a_start_that_fails_says_where_the_log_is_and_gives_the_directory_back(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("not a directory")

    async def story(valkey: EmbeddedValkey) -> None:
        with pytest.raises(ValkeyFailed, match=r"ended with code 1 while starting; see .*valkey\.log"):
            await valkey.start()

        (tmp_path / "appendonlydir").unlink()
        second = EmbeddedValkey(tmp_path)
        await second.start()
        await second.stop()

    _run(tmp_path, story)


def test_waiting_for_a_server_that_never_started_is_a_mistake(tmp_path: Path) -> None:
    async def story(valkey: EmbeddedValkey) -> None:
        with pytest.raises(RuntimeError, match="not started"):
            await valkey.wait()

    _run(tmp_path, story)


def test_a_start_cancelled_at_any_moment_leaves_no_server_and_no_lock(tmp_path: Path) -> None:
    async def main() -> None:
        steps, cancelled, is_untouched = 1, 0, False
        while not is_untouched:
            valkey = EmbeddedValkey(tmp_path)
            start = asyncio.create_task(valkey.start())
            for _ in range(steps):
                await asyncio.sleep(0)
            start.cancel()
            await asyncio.wait([start])
            is_untouched = not start.cancelled()
            cancelled += start.cancelled()
            # Grows fast: between two polls of the starting server lie hundreds of turns of the loop.
            steps += max(1, steps // 2)
            assert valkey.is_alive == is_untouched
            await valkey.stop()

        assert cancelled > 5

    asyncio.run(main())


def test_the_server_ends_with_the_thread_that_launched_it(tmp_path: Path) -> None:
    launched = []

    def launch() -> None:
        launched.append(_launch(tmp_path))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()

    assert launched[0].wait() == -signal.SIGKILL
