"""What the Redis store does when something breaks: it says `QueueDown` in time, loses nothing, and works again."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from router.queue.keys import ticket_keys
from router.queue.limits import OWNER_GRACE_S
from router.queue.redis import QueueUnfit, RedisQueue
from router.queue.store import Enqueued, QueueDown, QueueStats, Ticket
from tests.queue.servers import Server, queue_at, running, valkey_binary, wait_until

_MODEL = "model"
_BOUNDS = {"max_requests": 1_000, "max_tokens": 1_000_000}

#: What docs/queue.md tells an operator to allow.
_ACL = (
    "+eval",
    "+evalsha",
    "+ping",
    "+info",
    "+time",
    "+get",
    "+set",
    "+hget",
    "+hset",
    "+hdel",
    "+hincrby",
    "+hgetall",
    "+zadd",
    "+zrem",
    "+zcard",
    "+zcount",
    "+zrank",
    "+zrange",
    "+zrangebylex",
    "+zrangebyscore",
)


def _run(server: Server, story: Callable[[RedisQueue], Awaitable[None]], *, timeout_s: float = 5.0) -> None:
    async def main() -> None:
        queue = queue_at(server.url, timeout_s=timeout_s)
        try:
            await story(queue)
        finally:
            await queue.close()

    asyncio.run(main())


async def _enqueue(queue: RedisQueue, name: str, *, model: str = _MODEL) -> Ticket:
    answer = await queue.enqueue(model, Ticket(name, "me", 10), **_BOUNDS)
    assert isinstance(answer, Enqueued)
    return answer.ticket


def test_a_server_that_forgot_the_scripts_is_told_them_again(server: Server) -> None:
    async def story(queue: RedisQueue) -> None:
        for number in range(3):
            server.call("SCRIPT", "FLUSH")
            await _enqueue(queue, f"t{number}")
            server.call("SCRIPT", "FLUSH")
            assert await queue.ahead(_MODEL, f"t{number}") == number

    _run(server, story)


def test_a_stopped_server_is_queue_down_and_its_return_needs_no_restart(server: Server) -> None:
    async def story(queue: RedisQueue) -> None:
        await _enqueue(queue, "before")
        server.stop()

        for _ in range(3):
            with pytest.raises(QueueDown, match="cannot be reached"):
                await queue.stats(_MODEL)
        server.start()

        await _enqueue(queue, "after")
        assert (await queue.stats(_MODEL)).requests == 1

    _run(server, story)


def test_a_restart_between_two_calls_is_not_noticed(server: Server) -> None:
    async def story(queue: RedisQueue) -> None:
        await asyncio.gather(*(queue.stats(_MODEL) for _ in range(8)))
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)

        await asyncio.gather(*(queue.stats(_MODEL) for _ in range(8)))

    _run(server, story)


def test_a_server_that_hangs_is_queue_down_at_the_timeout(server: Server) -> None:
    async def story(queue: RedisQueue) -> None:
        await _enqueue(queue, "before")
        server.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(QueueDown, match=r"did not answer within 0\.2 s"):
                await queue.stats(_MODEL)
            with pytest.raises(QueueDown, match=r"did not answer within 0\.2 s"):
                await asyncio.gather(*(queue.stats(_MODEL) for _ in range(40)))
        finally:
            server.process.send_signal(signal.SIGCONT)

        assert (await _answer_when_back(lambda: queue.stats(_MODEL))).requests == 1

    _run(server, story, timeout_s=0.2)


async def _answer_when_back(call: Callable[[], Awaitable[QueueStats]]) -> QueueStats:
    for _ in range(50):
        try:
            return await call()
        except QueueDown:
            await asyncio.sleep(0.05)
    raise AssertionError("the queue did not come back")


def test_a_full_server_refuses_newcomers_whole_and_lets_everyone_else_go_on(server: Server) -> None:
    async def story(queue: RedisQueue) -> None:
        await _enqueue(queue, "one")
        await _enqueue(queue, "two")
        server.call("CONFIG", "SET", "maxmemory", 1)

        with pytest.raises(QueueDown, match="OOM"):
            await _enqueue(queue, "three")

        stats = await queue.stats(_MODEL)
        assert (stats.requests, stats.tokens) == (2, 20)
        assert await queue.ahead(_MODEL, "three") is None
        await queue.beat(_MODEL, "me", lease_s=60)
        claimed = await queue.claim(_MODEL, "me", max_tokens=10)
        assert claimed is not None
        await queue.put_back(_MODEL, claimed)
        assert await queue.leave(_MODEL, "two", "me")
        await queue.beat(_MODEL, "me", lease_s=0)
        assert await queue.reap(_MODEL) == 1
        server.call("CONFIG", "SET", "maxmemory", 0)
        await _enqueue(queue, "three")
        assert (await queue.stats(_MODEL)).requests == 1

    _run(server, story)


def test_a_server_that_became_a_replica_is_queue_down_until_it_is_primary_again(server: Server) -> None:
    async def story(queue: RedisQueue) -> None:
        await _enqueue(queue, "one")
        server.call("REPLICAOF", "127.0.0.1", 1)

        with pytest.raises(QueueDown, match="READONLY"):
            await _enqueue(queue, "two")
        with pytest.raises(QueueDown, match="READONLY"):
            await queue.claim(_MODEL, "me", max_tokens=10)

        server.call("REPLICAOF", "NO", "ONE")
        await _enqueue(queue, "two")
        assert (await queue.stats(_MODEL)).requests == 2

    _run(server, story)


def test_after_a_read_only_reply_no_old_connection_is_used_again(server: Server) -> None:
    async def story(queue: RedisQueue) -> None:
        await asyncio.gather(*(queue.ping() for _ in range(6)))
        server.call("REPLICAOF", "127.0.0.1", 1)
        before = _client_ids(server)
        with pytest.raises(QueueDown):
            await _enqueue(queue, "one")

        await asyncio.gather(*(queue.ping() for _ in range(6)))

        assert before
        assert not before & _client_ids(server)

    _run(server, story)


def _client_ids(server: Server) -> set[int]:
    """The open connections, but a replica's link and the one that asks (whose number is the highest)."""
    lines = server.call("CLIENT", "LIST").decode().splitlines()
    clients = [dict(word.partition("=")[::2] for word in line.split()) for line in lines]
    ids = sorted(int(client["id"]) for client in clients if "M" not in client["flags"])
    return set(ids[:-1])


def test_a_cancel_at_any_moment_leaves_every_other_reply_with_its_caller(server: Server) -> None:
    async def story(queue: RedisQueue) -> None:
        models = [f"model{number}" for number in range(4)]
        for number, model in enumerate(models, start=1):
            for index in range(number):
                await _enqueue(queue, f"t{index}", model=model)
        steps, cancelled, is_untouched = 0, 0, False

        while not is_untouched:
            victim = asyncio.create_task(queue.stats("victim"))
            kept = [asyncio.create_task(queue.stats(model)) for model in models]
            for _ in range(steps):
                await asyncio.sleep(0)
            victim.cancel()
            counts = [(await task).requests for task in kept]
            await asyncio.wait([victim])
            is_untouched = not victim.cancelled()
            cancelled += victim.cancelled()
            steps += 1
            assert counts == [1, 2, 3, 4]

        assert cancelled > 2
        assert len(_client_ids(server)) <= 5

    _run(server, story)


def test_a_hundred_callers_share_a_bounded_number_of_connections(server: Server) -> None:
    async def main() -> None:
        queue = queue_at(server.url, connections_max=3)
        await asyncio.gather(*(queue.stats(_MODEL) for _ in range(100)))

        assert len(_client_ids(server)) == 3

        await queue.close()
        wait_until(lambda: not _client_ids(server))
        with pytest.raises(QueueDown):
            await queue.stats(_MODEL)

    asyncio.run(main())


def test_no_error_names_an_address_or_a_password(tmp_path: Path) -> None:
    async def main() -> None:
        texts = []
        for url in (
            "redis://someone:s3cret@127.0.0.1:1/0",
            "redis+sentinel://someone:s3cret@127.0.0.1:1,127.0.0.2:1/primary",
            "redis+cluster://someone:s3cret@127.0.0.1:1,127.0.0.2:1",
            f"unix://someone:s3cret@{tmp_path}/nobody.sock",
        ):
            queue = queue_at(url)
            with pytest.raises(QueueDown) as caught:
                await queue.ping()
            texts.append(str(caught.value))
            assert caught.value.__cause__ is None
            assert caught.value.__suppress_context__
            await queue.close()

        assert set(texts) == {"the queue's Redis cannot be reached"}

    asyncio.run(main())


def test_an_owner_that_never_beats_is_dead_after_the_grace(server: Server) -> None:
    async def story(queue: RedisQueue) -> None:
        await _enqueue(queue, "one")
        owners = ticket_keys("test", _MODEL)[4]

        lease_end_us = float(server.call("ZSCORE", owners, "me"))
        now_s = int(server.call("TIME")[0])

        assert 0 < lease_end_us / 1e6 - now_s <= OWNER_GRACE_S + 1

    _run(server, story)


def test_nothing_is_left_of_an_empty_line_but_its_counter(server: Server) -> None:
    async def story(queue: RedisQueue) -> None:
        for number in range(3):
            await _enqueue(queue, f"t{number}")
        await queue.claim(_MODEL, "me", max_tokens=10)
        await queue.leave(_MODEL, "t1", "me")
        await queue.beat(_MODEL, "me", lease_s=0)
        await queue.reap(_MODEL)

        assert server.call("KEYS", "*") == [ticket_keys("test", _MODEL)[5].encode()]

    _run(server, story)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru"])
def test_a_server_that_may_evict_is_refused_at_start_with_the_fix(server: Server, policy: str) -> None:
    async def story(queue: RedisQueue) -> None:
        await queue.start()
        server.call("CONFIG", "SET", "maxmemory-policy", policy)

        with pytest.raises(QueueUnfit, match=f"{policy}.*set `maxmemory-policy noeviction`"):
            await queue.start()

    _run(server, story)


def test_the_documented_permissions_are_enough(server: Server) -> None:
    server.call("ACL", "SETUSER", "lean", "on", ">pw", "~test:*", "-@all", *_ACL)

    async def main() -> None:
        queue = queue_at(server.url.replace("unix://", "unix://lean:pw@"))
        await queue.start()
        ticket = await _enqueue(queue, "one")
        await _enqueue(queue, "one")
        await queue.beat(_MODEL, "me", lease_s=0)
        assert await queue.claim(_MODEL, "me", max_tokens=10) == ticket
        await queue.put_back(_MODEL, ticket)
        await _enqueue(queue, "two")
        await _enqueue(queue, "two")
        assert await queue.leave(_MODEL, "one", "me")
        assert await queue.ahead(_MODEL, "two") == 0
        assert await queue.reap(_MODEL) == 1
        await queue.ping()
        await queue.close()

    asyncio.run(main())


def test_a_server_that_hides_its_memory_policy_is_used_with_a_warning(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.call("ACL", "SETUSER", "blind", "on", ">pw", "~*", "+@all", "-info", "-config")
    server.call("ACL", "SETUSER", "config", "on", ">pw", "~*", "+@all", "-info")
    server.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")

    async def main() -> None:
        blind, config = (queue_at(server.url.replace("unix://", f"unix://{user}:pw@")) for user in ("blind", "config"))
        with caplog.at_level(logging.WARNING, logger="router.queue.redis"):
            await blind.start()
        with pytest.raises(QueueUnfit, match="allkeys-lru"):
            await config.start()
        await blind.close()
        await config.close()

    asyncio.run(main())

    assert "hides its maxmemory-policy" in caplog.text


def test_wrong_credentials_and_forbidden_scripts_are_refused_at_start(server: Server) -> None:
    server.call("ACL", "SETUSER", "mute", "on", ">pw", "~*", "+@all", "-evalsha", "-eval")

    async def main() -> None:
        for user, password, code in (("mute", "pw", "NOPERM"), ("mute", "wr0ng", "WRONGPASS")):
            queue = queue_at(server.url.replace("unix://", f"unix://{user}:{password}@"))
            with pytest.raises(QueueUnfit, match=code) as caught:
                await queue.start()
            assert password == "pw" or password not in str(caught.value)
            await queue.close()

    asyncio.run(main())


def test_a_server_that_asks_for_a_password_says_so_at_start(tmp_path: Path) -> None:
    with running(valkey_binary(), tmp_path) as server:
        server.call("CONFIG", "SET", "requirepass", "pw")

        async def main() -> None:
            queue = queue_at(server.url)
            with pytest.raises(QueueUnfit, match="another user name or password"):
                await queue.start()
            await queue.close()

        asyncio.run(main())
