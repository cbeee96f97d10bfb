"""The same queue over a Redis Cluster, behind Sentinel, over TLS and over TCP with credentials."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from router.queue.keys import ticket_keys
from router.queue.redis import QueueUnfit, RedisQueue
from router.queue.store import Enqueued, QueueDown, Ticket
from tests.queue.servers import Sentinel, Server, free_port, opened, running, started, valkey_binary, wait_until

_BOUNDS = {"max_requests": 100, "max_tokens": 10_000}
_SLOTS = 16_384


async def _exercise(queue: RedisQueue, model: str) -> None:
    """One ticket through every operation."""
    answer = await queue.enqueue(model, Ticket("one", "me", 10), **_BOUNDS)
    assert isinstance(answer, Enqueued)
    await queue.enqueue(model, Ticket("two", "me", 10), **_BOUNDS)
    await queue.beat(model, "me", lease_s=60)
    assert await queue.ahead(model, "two") == 1
    assert await queue.claim(model, "me", max_tokens=10) == answer.ticket
    await queue.put_back(model, answer.ticket)
    assert await queue.leave(model, "one", "me")
    await queue.beat(model, "me", lease_s=0)
    assert await queue.reap(model) == 1
    assert (await queue.stats(model)).requests == 0


async def _until_it_answers(call: Callable[[], Awaitable[object]]) -> None:
    """Call again while the store is away, as the router does; bounded."""
    for _ in range(200):
        try:
            await call()
        except QueueDown:
            await asyncio.sleep(0.05)
        else:
            return
    raise AssertionError("the queue did not come back")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Three primaries that share all slots. A cluster takes two seconds to trust itself, so there is one for all."""
    with ExitStack() as stack:
        servers = []
        for _ in range(3):
            directory = tmp_path_factory.mktemp("node")
            options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "2000")
            partial = ("--cluster-require-full-coverage", "no")
            servers.append(
                stack.enter_context(running(valkey_binary(), directory, *options, *partial, port=free_port()))
            )
        for number, node in enumerate(servers):
            node.call("CLUSTER", "ADDSLOTSRANGE", number * _SLOTS // 3, (number + 1) * _SLOTS // 3 - 1)
            bus_port = int(node.call("CONFIG", "GET", "cluster-port")[1])
            servers[0].call("CLUSTER", "MEET", "127.0.0.1", node.port, bus_port)
        yield servers


@pytest.fixture
def cluster(nodes: list[Server]) -> list[Server]:
    """The cluster, whole and empty."""
    for node in nodes:
        wait_until(lambda node=node: {b"cluster_state:ok", b"cluster_slots_ok:16384"} <= _cluster_info(node))
        node.call("FLUSHALL")
    return nodes


def _cluster_info(node: Server) -> set[bytes]:
    info = node.call("CLUSTER", "INFO")
    if isinstance(info, bytes):
        return set(info.split())
    return {f"{name}:{value}".encode() for name, value in info.items()}


def _model_on(node: Server, number: int) -> str:
    """A model name whose keys lie on the given third of the slots."""
    for candidate in range(1_000):
        name = f"model {candidate}"
        slot = int(node.call("CLUSTER", "KEYSLOT", ticket_keys("test", name)[0]))
        if number * _SLOTS // 3 <= slot < (number + 1) * _SLOTS // 3:
            return name
    raise AssertionError


def test_a_cluster_keeps_each_model_on_one_node_and_loses_only_those_of_a_lost_node(cluster: list[Server]) -> None:
    models = [_model_on(cluster[0], number) for number in range(3)]

    async def main() -> None:
        # The first address is dead: the second must be found in time.
        url = f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster[1].port}"
        async with opened(url, timeout_s=3.0) as queue:
            await queue.start()
            await queue.ping()
            await asyncio.gather(*(_exercise(queue, model) for model in models))

            await asyncio.to_thread(cluster[0].stop)

            with pytest.raises(QueueDown):
                await queue.stats(models[0])
            await _exercise(queue, models[1])
            await _exercise(queue, models[2])
            await asyncio.to_thread(cluster[0].start)
            await _until_it_answers(lambda: queue.stats(models[0]))
            await queue.close()
            await queue.close()
            with pytest.raises(QueueDown):
                await queue.stats(models[1])

    asyncio.run(main())


def test_a_cancel_leaves_every_other_reply_with_its_caller_in_a_cluster_too(cluster: list[Server]) -> None:
    models = [_model_on(cluster[0], number) for number in range(3)]

    async def main() -> None:
        async with opened(f"redis+cluster://127.0.0.1:{cluster[0].port}") as queue:
            for number, model in enumerate(models, start=1):
                for index in range(number):
                    await queue.enqueue(model, Ticket(f"t{index}", "me", 10), **_BOUNDS)
            for turns in range(40):
                victim = asyncio.create_task(queue.stats(models[turns % 3]))
                kept = [asyncio.create_task(queue.stats(model)) for model in models]
                for _ in range(turns):
                    await asyncio.sleep(0)
                victim.cancel()
                assert [(await task).requests for task in kept] == [1, 2, 3]
                await asyncio.wait([victim])

    asyncio.run(main())


def test_a_cluster_with_one_evicting_node_is_refused(cluster: list[Server]) -> None:
    cluster[2].call("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")

    async def main() -> None:
        async with opened(f"redis+cluster://127.0.0.1:{cluster[0].port}") as queue:
            with pytest.raises(QueueUnfit, match="allkeys-lfu"):
                await queue.start()

    asyncio.run(main())
    cluster[2].call("CONFIG", "SET", "maxmemory-policy", "noeviction")


def test_a_slot_that_moves_is_queue_down_meanwhile_and_followed_after(cluster: list[Server]) -> None:
    model = _model_on(cluster[0], 0)
    slot = int(cluster[0].call("CLUSTER", "KEYSLOT", ticket_keys("test", model)[0]))
    ids = [node.call("CLUSTER", "MYID") for node in cluster]

    async def main() -> None:
        async with opened(f"redis+cluster://127.0.0.1:{cluster[0].port}") as queue:
            await queue.stats(model)
            cluster[1].call("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
            cluster[0].call("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])

            with pytest.raises(QueueDown, match=r"ASK: the keys are moving"):
                await queue.enqueue(model, Ticket("one", "me", 10), **_BOUNDS)
            for node in (cluster[1], cluster[0], cluster[2]):
                node.call("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
            await _exercise(queue, model)

            assert cluster[1].call("DBSIZE") > 0

    asyncio.run(main())
    for node in cluster:
        node.call("FLUSHALL")
    for node in cluster:
        node.call("CLUSTER", "SETSLOT", slot, "NODE", ids[0])


def test_sentinel_leads_to_the_new_primary_after_a_failover_and_nothing_is_lost(tmp_path: Path) -> None:
    binary = valkey_binary()
    with ExitStack() as stack:
        at_once = ("--repl-diskless-sync-delay", "0")
        primary = stack.enter_context(running(binary, tmp_path / "primary", *at_once, port=free_port()))
        replicaof = ("--replicaof", f"127.0.0.1 {primary.port}")
        replica = stack.enter_context(running(binary, tmp_path / "replica", *replicaof, port=free_port()))
        wait_until(lambda: replica.call("INFO", "replication")["master_link_status"] == "up")
        sentinel = stack.enter_context(
            started(Sentinel(binary, tmp_path / "sentinel", primary_name="the-primary", primary_port=primary.port))
        )
        wait_until(lambda: _replica_is_known(sentinel))

        async def main() -> None:
            url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/the-primary"
            async with opened(url, timeout_s=3.0) as queue:
                await queue.start()
                await _exercise(queue, "model")
                await queue.enqueue("model", Ticket("kept", "me", 10), **_BOUNDS)
                primary.call("WAIT", 1, 5_000)

                primary.stop()
                with pytest.raises(QueueDown):
                    await queue.stats("model")
                sentinel.call("SENTINEL", "FAILOVER", "the-primary")
                await _until_it_answers(lambda: queue.enqueue("model", Ticket("new", "me", 10), **_BOUNDS))

                assert await queue.ahead("model", "kept") == 0
                assert await queue.ahead("model", "new") == 1
                assert replica.call("EXISTS", ticket_keys("test", "model")[0]) == 1

        asyncio.run(main())


def test_a_name_that_no_sentinel_knows_is_queue_down(tmp_path: Path) -> None:
    with started(Sentinel(valkey_binary(), tmp_path, primary_name="the-primary", primary_port=1)) as sentinel:

        async def main() -> None:
            async with opened(f"redis+sentinel://127.0.0.1:{sentinel.port}/another-name") as queue:
                with pytest.raises(QueueDown, match="cannot be reached"):
                    await queue.ping()

        asyncio.run(main())


def _replica_is_known(sentinel: Server) -> bool:
    """Whether the sentinel has heard from the replica itself, without which it promotes none."""
    replicas = sentinel.call("SENTINEL", "REPLICAS", "the-primary")
    return bool(replicas) and b"master-link-status ok" in b" ".join(replicas[0])


def test_credentials_and_a_database_reach_a_server_on_tcp(tmp_path: Path) -> None:
    with running(valkey_binary(), tmp_path, port=free_port()) as server:
        server.call("ACL", "SETUSER", "a/user", "on", ">p@ss/word", "~*", "+@all")

        async def main() -> None:
            async with opened(f"redis://a%2Fuser:p%40ss%2Fword@127.0.0.1:{server.port}/3") as queue:
                await queue.start()
                await _exercise(queue, "model")

        asyncio.run(main())

        assert server.call("INFO", "keyspace").keys() == {"db3"}
