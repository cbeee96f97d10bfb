"""The queue in Redis or Valkey: `QueueStore` over one Lua script an operation.

Every operation is one EVALSHA (EVAL once more where the server does not know the script, which proves that it did not
run), within one deadline of `timeout_s` that covers waiting for a connection, connecting, sending and reading. All
failures become `QueueDown`, without address or password; redis-py's types end here. Nothing is retried: after
`QueueDown` the operation may or may not have taken place, and every operation may be sent again safely. Only `claim`
needs the owner's memory for that: a ticket whose claim was lost is out of the line, and `put_back` with the ticket
that `enqueue` returned brings it to its place (and does nothing if it never left).
"""

import asyncio
import logging
import re
from collections.abc import Awaitable
from typing import TypeVar

from router.config.redis_url import RedisKind, RedisUrl
from router.queue.cluster import ClusterLink
from router.queue.failure import FOREIGN_ERRORS, Refused, as_queue_down, code_of
from router.queue.keys import escape, ticket_keys, unescape
from router.queue.limits import OWNER_GRACE_S, check_place, check_ticket
from router.queue.link import Argument, Link, Reply, open_link
from router.queue.scripts import script
from router.queue.store import Enqueued, EnqueueRefusal, QueueStats, Ticket

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Calls in flight a process. A call takes well under a millisecond of Redis; more connections only move the wait.
CONNECTIONS_MAX = 16

_GRACE_US = int(OWNER_GRACE_S * 1e6)

#: What the store needs of its server, for the operator who writes an ACL.
_NEEDS = (
    "EVAL, EVALSHA, PING, INFO, TIME, and the write and read commands of docs/queue.md on the keys of redis.key_prefix"
)


class QueueUnfit(Exception):
    """The store answers but must not be used as it is set. The message says the fix; it has no address or password."""


class RedisQueue:
    """A `QueueStore` in Redis 6.2 or newer, or Valkey, reached directly, by Sentinel or as a Cluster.

    `timeout_s` bounds every call. Owns its connections; `close` gives them back. Used from one event loop.
    """

    def __init__(
        self, url: RedisUrl, *, key_prefix: str, timeout_s: float, connections_max: int = CONNECTIONS_MAX
    ) -> None:
        is_cluster = url.kind is RedisKind.CLUSTER
        self._link: Link = (ClusterLink if is_cluster else open_link)(
            url, connections_max=connections_max, timeout_s=timeout_s
        )
        self._prefix = key_prefix
        self._timeout_s = timeout_s

    async def start(self) -> None:
        """Prove that the store is fit for a queue. May be called again, after `QueueDown` say.

        Raises:
            QueueUnfit: it may evict keys, refuses the credentials, or does not let this user run scripts.
            QueueDown: it cannot be reached.
        """
        try:
            await self._run("stats", "")
            policies = await self._memory_policies()
        except Refused as refused:
            if refused.code in ("NOPERM", "WRONGPASS"):
                raise QueueUnfit(f"{refused}; correct redis.url, or let this user run {_NEEDS}") from None
            raise
        wrong = next((policy for policy in policies if policy != "noeviction"), None)
        if wrong is not None:
            raise QueueUnfit(
                f"the queue's Redis has maxmemory-policy {wrong}, which may drop waiting requests without a word; "
                "set `maxmemory-policy noeviction`, or give the queue a Redis of its own"
            )
        if not policies:
            _LOG.warning("the queue's Redis hides its maxmemory-policy; make sure that it is noeviction")

    async def enqueue(
        self, model: str, ticket: Ticket, *, max_requests: int, max_tokens: int
    ) -> Enqueued | EnqueueRefusal:
        check_ticket(ticket)
        reply = await self._run(
            "enqueue",
            model,
            _id_bytes(ticket.id),
            escape(ticket.owner),
            ticket.tokens,
            ticket.priority,
            max_requests,
            max_tokens,
            _GRACE_US,
        )
        if reply[0] != b"ok":
            return EnqueueRefusal(reply[0].decode())
        _, seq, tokens, priority, owner, ahead_requests, ahead_tokens = reply
        return Enqueued(Ticket(ticket.id, unescape(owner), tokens, priority, seq), ahead_requests, ahead_tokens)

    async def claim(self, model: str, owner: str, *, max_tokens: int) -> Ticket | None:
        reply = await self._run("claim", model, escape(owner), max_tokens)
        if reply is None:
            return None
        ticket_id, seq, tokens, priority = reply
        return Ticket(_id_text(ticket_id), owner, tokens, priority, seq)

    async def put_back(self, model: str, ticket: Ticket) -> None:
        check_place(ticket)
        await self._run(
            "put_back",
            model,
            _id_bytes(ticket.id),
            escape(ticket.owner),
            ticket.tokens,
            ticket.priority,
            ticket.seq,
            _GRACE_US,
        )

    async def leave(self, model: str, ticket_id: str, owner: str) -> bool:
        return bool(await self._run("leave", model, _id_bytes(ticket_id), escape(owner)))

    async def ahead(self, model: str, ticket_id: str) -> int | None:
        rank: int | None = await self._run("ahead", model, _id_bytes(ticket_id))
        return rank

    async def beat(self, model: str, owner: str, *, lease_s: float) -> None:
        await self._run("beat", model, escape(owner), int(lease_s * 1e6))

    async def reap(self, model: str, *, limit: int = 100) -> int:
        return int(await self._run("reap", model, limit))

    async def stats(self, model: str) -> QueueStats:
        requests, tokens, age_us = await self._run("stats", model)
        return QueueStats(requests, tokens, age_us / 1e6)

    async def ping(self) -> None:
        await self._bounded(self._link.call_all("PING"))

    async def close(self) -> None:
        await self._link.close()

    async def _run(self, operation: str, model: str, *arguments: Argument) -> Reply:
        """One operation on a model's line."""
        return await self._bounded(self._evaluate(operation, ticket_keys(self._prefix, model), arguments))

    async def _evaluate(self, operation: str, keys: tuple[str, ...], arguments: tuple[Argument, ...]) -> Reply:
        lua = script(operation)
        try:
            return await self._link.call("EVALSHA", lua.digest, len(keys), *keys, *arguments)
        except FOREIGN_ERRORS as error:
            if code_of(error) != "NOSCRIPT":
                raise
        # EVAL, not SCRIPT LOAD: one permission less, and in a cluster it goes to the node that has the keys.
        return await self._link.call("EVAL", lua.source, len(keys), *keys, *arguments)

    async def _bounded(self, work: Awaitable[_T]) -> _T:
        """`work` within the one deadline of a call; the boundary behind which no foreign exception is seen."""
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await work
        except FOREIGN_ERRORS as error:
            raise as_queue_down(error, self._timeout_s) from None
        if task.cancelling() > cancels:
            # Python 3.11's `asyncio.wait_for`, which redis-py writes through, loses a cancel that comes with its end.
            raise asyncio.CancelledError
        return result

    async def _memory_policies(self) -> list[str]:
        """`maxmemory-policy` of every primary; empty where the server hides it."""
        # INFO first: managed services forbid CONFIG more often.
        for command in (("INFO", "memory"), ("CONFIG", "GET", "maxmemory-policy")):
            try:
                replies = await self._bounded(self._link.call_all(*command))
            except Refused:
                continue
            policies = [policy for reply in replies if (policy := _policy(reply))]
            if len(policies) == len(replies):
                return policies
        return []


def _policy(reply: Reply) -> str:
    """`maxmemory-policy` in an INFO or CONFIG GET reply, raw or parsed by redis-py; empty if it is not there."""
    if isinstance(reply, dict):
        return str(reply.get("maxmemory_policy") or reply.get("maxmemory-policy") or "")
    text = b" ".join(reply) if isinstance(reply, list) else bytes(reply)
    match = re.search(rb"maxmemory[_-]policy[: ](\S+)", text)
    return match[1].decode() if match else ""


def _id_bytes(ticket_id: str) -> bytes:
    return ticket_id.encode("utf-8", "surrogatepass")


def _id_text(ticket_id: bytes) -> str:
    return ticket_id.decode("utf-8", "surrogatepass")
