"""An answer that is handed on while it comes: in order, until its end, its limits, or its taker's word."""

import asyncio

import pytest

from router.upstream.api import UpstreamLost, UpstreamTimeout
from tests.http.stack import still

from .fakes import STREAM_HEAD, Connection, RawServer, Script, piece, rest_of, run
from .test_contract import Kind, kind, open_, upstream

__all__ = ["kind"]

pytestmark = pytest.mark.usefixtures("each_loop")


def in_steps(*parts: bytes) -> tuple[Script, asyncio.Event]:
    """A script that sends the next part whenever the event is set; after the last it waits for the close."""
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD)
        for part in parts:
            await go_on.wait()
            go_on.clear()
            await connection.send(part)
        await connection.closed()

    return script, go_on


END = piece(b"")


def test_pieces_are_handed_over_as_they_come_and_the_end_is_told_by_read(kind: Kind) -> None:
    async def body() -> None:
        script, go_on = in_steps(piece(b"a"), piece(b"b"), piece(b"c") + END)
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            response = await open_(it)
            taken: list[bytes] = []

            def take(part: bytes) -> bool:
                taken.append(part)
                go_on.set()
                return True

            go_on.set()
            await response.forward(take)

            assert taken == [b"a", b"b", b"c"]
            assert await response.read() == b""
            response.close()

    run(body())


def test_a_taker_that_has_enough_is_left_alone_and_read_goes_on_where_it_stopped(kind: Kind) -> None:
    async def body() -> None:
        script, go_on = in_steps(piece(b"a"), piece(b"b") + END)
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            response = await open_(it)
            taken: list[bytes] = []

            def take(part: bytes) -> bool:
                taken.append(part)
                return False

            go_on.set()
            await response.forward(take)
            go_on.set()

            assert taken == [b"a"]
            assert await rest_of(response) == b"b"
            response.close()

    run(body())


def test_of_an_answer_on_hold_nothing_more_is_taken_until_it_is_asked_for(kind: Kind) -> None:
    """Many times what a socket and its readers ahead hold: some of it has to stay with who sends it."""
    size = 64 << 20

    async def body() -> None:
        is_all_out = asyncio.Event()

        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(STREAM_HEAD)
            await connection.send(piece(b"x" * size) + END)
            is_all_out.set()
            await connection.closed()

        async with RawServer(script) as server, upstream(kind, server.url) as it:
            response = await open_(it)
            response.hold()
            was_all_out = await still(is_all_out.is_set)
            whole = await rest_of(response)
            response.close()

            assert not was_all_out
            assert len(whole) == size

    run(body())


def test_a_taker_may_be_pushed_to_again_after_a_pause(kind: Kind) -> None:
    async def body() -> None:
        script, go_on = in_steps(piece(b"a"), piece(b"b"), piece(b"c") + END)
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            response = await open_(it)
            taken: list[bytes] = []

            def take(part: bytes) -> bool:
                taken.append(part)
                go_on.set()
                return part != b"a"

            go_on.set()
            await response.forward(take)
            await response.forward(take)

            assert taken == [b"a", b"b", b"c"]
            assert await response.read() == b""
            response.close()

    run(body())


def test_what_the_taker_raises_is_raised_where_it_is_waited_for(kind: Kind) -> None:
    async def body() -> None:
        script, go_on = in_steps(piece(b"a"), piece(b"b"))
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            response = await open_(it)

            def take(part: bytes) -> bool:
                raise LookupError(part)

            go_on.set()
            with pytest.raises(LookupError, match="a"):
                await response.forward(take)

            go_on.set()
            assert await response.read() == b"b"
            response.close()

    run(body())


def test_a_break_and_a_silence_end_it_as_they_end_a_read(kind: Kind) -> None:
    async def breaks(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + piece(b"a"))
        connection.writer.close()

    async def falls_silent(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + piece(b"a"))
        await connection.closed()

    async def body() -> None:
        for script, error in ((breaks, UpstreamLost), (falls_silent, UpstreamTimeout)):
            async with RawServer(script) as server, upstream(kind, server.url) as it:
                response = await open_(it, idle_s=0.05)
                taken: list[bytes] = []

                with pytest.raises(error):
                    await response.forward(lambda part: taken.append(part) is None)  # noqa: B023  # called in its turn

                assert taken == [b"a"]
                response.close()

    run(body())


def test_a_first_byte_that_does_not_come_is_late_for_a_taker_too(kind: Kind) -> None:
    async def body() -> None:
        script, _ = in_steps(piece(b"a"))
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            response = await open_(it, first_byte_s=0.05)

            with pytest.raises(UpstreamTimeout) as caught:
                await response.forward(lambda _: True)

            assert caught.value.phase == "first_byte"
            response.close()

    run(body())


def test_the_idle_limit_counts_from_the_last_piece_though_the_first_byte_had_longer(kind: Kind) -> None:
    async def body() -> None:
        script, go_on = in_steps(piece(b"a"), piece(b"b"))
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            response = await open_(it, first_byte_s=60, idle_s=0.05)

            go_on.set()
            with pytest.raises(UpstreamTimeout) as caught:
                await response.forward(lambda _: True)

            assert caught.value.phase == "idle"
            response.close()

    run(body())


def test_a_cancelled_taker_gets_nothing_more_and_no_byte_is_lost(kind: Kind) -> None:
    async def body() -> None:
        script, go_on = in_steps(piece(b"a"), piece(b"b") + END)
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            response = await open_(it)
            taken: list[bytes] = []
            forwarding = asyncio.create_task(response.forward(lambda part: taken.append(part) is None))
            go_on.set()
            while not taken:
                await asyncio.sleep(0)

            forwarding.cancel()
            go_on.set()
            await asyncio.wait({forwarding})

            assert forwarding.cancelled()
            assert await rest_of(response) == b"b"
            assert taken == [b"a"]
            response.close()

    run(body())
