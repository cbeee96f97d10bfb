"""A reply never reaches a caller that did not ask for it, shown on a server whose every answer the test holds back."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from router.config.redis_url import parse
from router.queue.link import Link, open_link


class SlowServer:
    """Answers `GET key` with the key, each only when the test lets it, in the order of arrival on its connection."""

    def __init__(self) -> None:
        self.seen: asyncio.Queue[tuple[bytes, Callable[[], None]]] = asyncio.Queue()
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    length = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(length + 2))[:-2])
                reply = b"$%d\r\n%b\r\n" % (len(words[-1]), words[-1])
                self.seen.put_nowait((words[-1], lambda reply=reply: writer.write(reply)))  # type: ignore[misc]
        finally:
            writer.close()


def _run(story: Callable[[SlowServer, Link], Awaitable[None]]) -> None:
    async def main() -> None:
        slow = SlowServer()
        server = await asyncio.start_server(slow.serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        link = open_link(parse(f"redis://{host}:{port}"), connections_max=1, timeout_s=30)
        try:
            await story(slow, link)
        finally:
            await link.close()
            server.close()
            await server.wait_closed()

    asyncio.run(main())


def test_a_reply_that_comes_after_its_caller_left_is_nobody_s() -> None:
    async def story(slow: SlowServer, link: Link) -> None:
        victim = asyncio.create_task(link.call("GET", "victim"))
        _, answer_victim = await slow.seen.get()
        victim.cancel()
        answer_victim()
        heir = asyncio.create_task(link.call("GET", "heir"))
        _, answer_heir = await slow.seen.get()
        answer_heir()

        assert await heir == b"heir"
        assert victim.cancelled()
        assert slow.connections == 2

    _run(story)


def test_a_reply_that_comes_after_the_deadline_is_nobody_s() -> None:
    async def story(slow: SlowServer, link: Link) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await link.call("GET", "victim")
        victim = asyncio.create_task(link.call("GET", "victim"))
        name, answer_victim = await slow.seen.get()
        answer_victim()

        assert (name, await victim) == (b"victim", b"victim")

    _run(story)


def test_a_second_cancel_while_the_first_is_handled_leaks_no_connection() -> None:
    async def story(slow: SlowServer, link: Link) -> None:
        for _ in range(5):
            victim = asyncio.create_task(link.call("GET", "victim"))
            await slow.seen.get()
            victim.cancel()
            await asyncio.sleep(0)
            victim.cancel()
            await asyncio.gather(victim, return_exceptions=True)
        heir = asyncio.create_task(link.call("GET", "heir"))
        _, answer = await slow.seen.get()
        answer()

        assert await heir == b"heir"

    _run(story)


def test_bytes_that_nobody_asked_for_end_the_connection_before_its_next_use() -> None:
    async def story(slow: SlowServer, link: Link) -> None:
        first = asyncio.create_task(link.call("GET", "first"))
        _, answer = await slow.seen.get()
        answer()
        await first
        answer()
        (_, idle) = link._idle[0]  # type: ignore[attr-defined]  # the pool's inside, to know that the bytes are there
        while not await idle.can_read():
            await asyncio.sleep(0)
        second = asyncio.create_task(link.call("GET", "second"))
        _, answer = await slow.seen.get()
        answer()

        assert await second == b"second"
        assert slow.connections == 2

    _run(story)


def test_closing_fails_the_calls_in_flight_and_those_after() -> None:
    async def story(slow: SlowServer, link: Link) -> None:
        call = asyncio.create_task(link.call("GET", "one"))
        await slow.seen.get()

        await link.close()

        with pytest.raises(Exception, match=r"Connection|closed"):
            await call
        with pytest.raises(Exception, match="closed"):
            await link.call("GET", "two")

    _run(story)
