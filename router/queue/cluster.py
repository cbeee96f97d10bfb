"""Finds the node of a Redis Cluster that has a key, and carries the command there over that node's own pool.

redis-py's cluster client is not used: it leaves sockets open when it is closed after a failure, takes closed idle
connections for good ones, and gives connections back in tasks that nobody owns. All that the queue needs of a cluster
is one slot for a script and its redirects.

Rules:
 - the map of slots is read when it is needed and forgotten when a node fails or redirects;
 - MOVED is followed at most `_REDIRECTS_MAX` times; it says that the node did not run the command;
 - ASK is not: while a slot moves key by key, a script on several keys gets TRYAGAIN at the other end too;
 - any other failure is the caller's: nothing is sent twice.
"""

import asyncio
from collections.abc import Sequence

from redis.crc import key_slot
from redis.exceptions import ClusterDownError, MovedError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from router.config.redis_url import RedisUrl
from router.queue.link import Argument, PooledLink, Reply, dial_server

_REDIRECTS_MAX = 5

#: Where the first key stands in EVALSHA and EVAL: after the script and the number of keys.
_KEY_POSITION = 3

_Address = tuple[str, int]


class ClusterLink:
    """A `Link` to a cluster: `connections_max` connections a node, one pool for each node of the map and of the URL.

    `call` takes EVALSHA and EVAL with keys only.
    """

    def __init__(self, url: RedisUrl, *, connections_max: int, timeout_s: float) -> None:
        self._url = url
        self._connections_max = connections_max
        # The deadline has room for two dead nodes before a live one, or for all that the URL names.
        self._step_s = timeout_s / (max(2, len(url.hosts)) + 1)
        self._entries: list[_Address] = list(url.hosts)
        self._ranges: list[tuple[int, int, _Address]] = []
        self._nodes: dict[_Address, PooledLink] = {}
        self._reading = asyncio.Lock()
        self._closed = False

    async def call(self, *command: Argument) -> Reply:
        key = command[_KEY_POSITION]
        slot = key_slot(key.encode() if isinstance(key, str) else bytes(key))
        address = await self._owner(slot)
        for _ in range(_REDIRECTS_MAX):
            try:
                return await self._node(address).call(*command)
            except MovedError as redirect:
                self._ranges = []
                address = (redirect.host or address[0], redirect.port)
            except ClusterDownError:
                self._ranges = []
                raise
            except ResponseError:
                raise
            except BaseException:
                # A cancel may be the deadline of a node that hangs, so it counts as a failure too.
                self._failed(address)
                raise
        raise RedisConnectionError("the cluster redirects in circles")

    async def call_all(self, *command: Argument) -> Sequence[Reply]:
        await self._read_map()
        return [await self._node(address).call(*command) for address in self._primaries()]

    async def close(self) -> None:
        self._closed = True
        nodes = list(self._nodes.values())
        self._nodes.clear()
        for node in nodes:
            await node.close()

    async def _owner(self, slot: int) -> _Address:
        await self._read_map()
        for first, last, address in self._ranges:
            if first <= slot <= last:
                return address
        self._ranges = []
        raise RedisConnectionError("no node serves the slot")

    async def _read_map(self) -> None:
        """Make sure there is a map; one caller reads it, the others wait for that one."""
        async with self._reading:
            if self._closed:
                raise RedisConnectionError("the link is closed")
            if self._ranges:
                return
            for entry in tuple(self._entries):
                try:
                    reply = await self._node(entry).call("CLUSTER", "SLOTS")
                except (RedisError, OSError) as error:
                    self._failed(entry)
                    failure = error
                    continue
                await self._adopt(entry, reply)
                return
            raise RedisConnectionError("no node of the cluster answers") from failure

    async def _adopt(self, entry: _Address, slots: Reply) -> None:
        """Take the map that `entry` gave: [first, last, [host, port, ...primary], ...replicas] a range."""
        self._ranges = [
            # An empty or missing host means: the host that was asked.
            (first, last, ((primary[0] or b"").decode() or entry[0], int(primary[1])))
            for first, last, primary, *_ in slots
        ]
        self._entries = list(dict.fromkeys((entry, *self._primaries(), *self._url.hosts)))
        for gone in set(self._nodes).difference(self._entries):
            await self._nodes.pop(gone).close()

    def _primaries(self) -> list[_Address]:
        return list(dict.fromkeys(address for _, _, address in self._ranges))

    def _node(self, address: _Address) -> PooledLink:
        if self._closed:
            raise RedisConnectionError("the link is closed")
        if address not in self._nodes:
            self._nodes[address] = PooledLink(
                lambda: dial_server(self._url, self._step_s, address), connections_max=self._connections_max
            )
        return self._nodes[address]

    def _failed(self, address: _Address) -> None:
        """Ask this node last, and read the map again before the next call."""
        self._ranges = []
        if address in self._entries:
            self._entries.remove(address)
            self._entries.append(address)
