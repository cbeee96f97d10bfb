"""The engine's connection under what an engine, the network or this machine may do to it: bounds, cuts, faults.

Operations on the socket are counted and failed through `Faulty`, which stands between the loop and the connection.
"""

import asyncio
import errno
import random
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from router.config.model import EngineConfig
from router.policy.lifecycle import EngineState, LifecycleEvent
from router.upstream import address, connection, wire
from router.upstream.api import (
    ConnectFailed,
    SocketsExhausted,
    UpstreamError,
    UpstreamLost,
    UpstreamRequest,
    UpstreamTimeout,
)
from router.upstream.connection import EngineUpstream
from router.upstream.engine import Engine
from router.upstream.response import WireResponse
from router.upstream.wire import BARREN_MAX_BYTES, UNREAD_MAX_BYTES, Wire
from tests.flow.jumping import JumpingLoop, run_on

from .fakes import STREAM_HEAD, Connection, RawServer, SeenRequest, answer, piece, read, rest_of, run, serve

pytestmark = pytest.mark.usefixtures("each_loop")

POST = UpstreamRequest("POST", "/v1/completions", ((b"content-type", b"application/json"),), b'{"a":1}')
PLACES = 8


def engine_at(url: str, **options: Any) -> EngineUpstream:
    return EngineUpstream("e", url, api_key=None, connections_max=PLACES, **options)


async def ask(it: EngineUpstream, request: UpstreamRequest = POST, **limits: float) -> WireResponse:
    return await it.open(request, **{"connect_s": 5.0, "first_byte_s": 5.0, "idle_s": 5.0, **limits})


def check_at_rest(it: EngineUpstream) -> None:
    assert (it._places_free, len(it._busy), len(it._waiters)) == (PLACES, 0, 0)
    assert not any(kept.is_dropped for kept in it._idle)


class Faulty:
    """Connects for real and gives the connection a transport on which the Nth operation fails.

    Operations: the connecting, each write, each read (what came is lost with the connection), and each abort.
    """

    def __init__(self, port: int, fail_at: int = 0) -> None:
        self.port = port
        self.fail_at = fail_at
        self.done = 0
        self.open = 0
        #: What the transport still had to send, at each write.
        self.held_bytes: list[int] = []
        self.before_a_large_write: Callable[[], object] = lambda: None

    async def __call__(self, protocol: Callable[[], asyncio.Protocol]) -> object:
        if self.fails():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused by the test")
        loop = asyncio.get_running_loop()
        return await loop.create_connection(lambda: _Between(self, protocol()), "127.0.0.1", self.port)

    def fails(self) -> bool:
        self.done += 1
        return self.done == self.fail_at


class _Between(asyncio.Protocol):
    """The protocol that the loop sees."""

    def __init__(self, faults: Faulty, inner: asyncio.Protocol) -> None:
        self._faults = faults
        self._inner = inner
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._faults.open += 1
        self._inner.connection_made(cast("asyncio.Transport", _Transport(self._faults, self.transport)))

    def data_received(self, data: bytes) -> None:
        if self._faults.fails():
            self.transport.abort()
        else:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._faults.open -= 1
        self._inner.connection_lost(exc)


class _Transport:
    """The transport that the connection sees."""

    def __init__(self, faults: Faulty, transport: asyncio.Transport) -> None:
        self._faults = faults
        self._transport = transport

    def write(self, data: bytes) -> None:
        self._faults.held_bytes.append(self._transport.get_write_buffer_size())
        if len(data) > wire.JOINED_MAX_BYTES:
            self._faults.before_a_large_write()
        if self._faults.fails():
            self._transport.abort()
        else:
            self._transport.write(data)

    def abort(self) -> None:
        if self._faults.fails():
            # The other side was quicker.
            asyncio.get_running_loop().call_soon(self._transport.abort)
        else:
            self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


# -- what an engine may send ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3, 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: +3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: xchunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: 1\r\n folded: 2\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: 1\x00\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\ncontent-length: 0\n\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        STREAM_HEAD + b"zz\r\nab\r\n",
        STREAM_HEAD + b"fffffffffffffffff\r\nab\r\n",
        STREAM_HEAD + b"3\r\nabcd\r\n0\r\n\r\n",
    ],
)
def test_an_answer_whose_framing_is_in_doubt_is_lost_and_its_connection_gone(said: bytes) -> None:
    async def script(served: Connection) -> None:
        await served.request()
        await served.send(said)
        await served.closed()

    async def test() -> None:
        async with RawServer(script) as server:
            it = engine_at(server.url)

            with pytest.raises(UpstreamLost) as caught:
                await read(await ask(it))

            assert str(caught.value)
            assert len(it._idle) == 0
            check_at_rest(it)

    run(test())


class Deaf(asyncio.Transport):
    """Takes what is written and says nothing."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        pass


def test_why_an_answer_was_refused_is_told_also_while_another_error_is_handled() -> None:
    async def test() -> None:
        wire = Wire(engine_at("http://127.0.0.1:1"), asyncio.get_running_loop())
        wire.connection_made(Deaf())
        response = wire.ask(b"", is_head_only=False, first_byte_s=5.0, idle_s=5.0)

        try:
            raise LookupError
        except LookupError:
            wire.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n")

        assert isinstance(response.error, UpstreamLost)
        assert "a transfer coding that is not chunked" in str(response.error)

    run(test())


@pytest.mark.parametrize(
    "flood",
    [
        lambda: b"x-%d: %s\r\n" % (random.Random(1).randrange(9), b"a" * 1000),
        lambda: b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
    ids=["headers", "interim answers"],
)
def test_a_head_without_end_is_cut_at_its_bound(flood: Callable[[], bytes]) -> None:
    sent = 0

    async def script(served: Connection) -> None:
        nonlocal sent
        await served.request()
        one = flood()
        if one.startswith(b"x-"):
            await served.send(b"HTTP/1.1 200 OK\r\n")
        try:
            while sent < 100 * BARREN_MAX_BYTES:
                await served.send(one)
                sent += len(one)
        except ConnectionError:
            pass

    async def test() -> None:
        async with RawServer(script) as server:
            it = engine_at(server.url)

            with pytest.raises(UpstreamLost, match="bytes of head"):
                await ask(it)
            while server._tasks:
                await asyncio.sleep(0)

            assert sent < 100 * BARREN_MAX_BYTES
            check_at_rest(it)

    run(test())


@pytest.mark.parametrize("begin", [b"0\r\nx: ", b"1;ext="], ids=["trailers", "chunk extensions"])
def test_trailers_and_chunk_extensions_without_end_are_cut_at_their_bound(begin: bytes) -> None:
    async def script(served: Connection) -> None:
        await served.request()
        await served.send(STREAM_HEAD + piece(b"one") + begin)
        try:
            while True:
                await served.send(b"a" * 4096)
        except ConnectionError:
            pass

    async def test() -> None:
        async with RawServer(script) as server:
            it = engine_at(server.url)
            response = await ask(it)

            assert await response.read() == b"one"
            with pytest.raises(UpstreamLost, match="chunk extensions"):
                await rest_of(response)

            check_at_rest(it)

    run(test())


def test_interim_answers_are_skipped_and_trailers_dropped() -> None:
    said = (
        b"HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
        + STREAM_HEAD
        + b"3;ext=1\r\nabc\r\n0\r\nx-late: 1\r\n\r\n"
    )

    async def test() -> None:
        async with RawServer(serve(lambda _: said)) as server:
            it = engine_at(server.url)
            for _ in range(2):
                response = await ask(it)

                assert response.headers == [(b"content-type", b"text/event-stream")]
                assert await read(response) == b"abc"

            assert server.connections == 1
            await it.aclose()

    run(test())


@pytest.mark.parametrize("surplus", [b"x", b"HTTP", answer(b"not asked for")], ids=["byte", "part", "answer"])
@pytest.mark.parametrize("is_later", [False, True], ids=["with it", "later"])
def test_bytes_that_nobody_asked_for_are_no_answer_to_the_next_request(surplus: bytes, is_later: bool) -> None:
    async def script(served: Connection) -> None:
        await served.request()
        if is_later:
            await served.send(answer(b"first"))
            await asyncio.sleep(0)
            await served.send(surplus)
        else:
            await served.send(answer(b"first") + surplus)
        await served.closed()

    async def test() -> None:
        async with RawServer(script) as server:
            it = engine_at(server.url)

            assert await read(await ask(it)) == b"first"
            while it._idle:
                await asyncio.sleep(0)
            assert await read(await ask(it)) == b"first"

            assert server.connections == 2
            await it.aclose()

    run(test())


def test_a_body_shorter_than_its_length_is_lost_and_a_204_has_none() -> None:
    said = iter((b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", b"HTTP/1.1 204 No\r\ncontent-length: 5\r\n\r\n"))

    async def script(served: Connection) -> None:
        await served.request()
        await served.send(next(said))

    async def test() -> None:
        async with RawServer(script) as server:
            it = engine_at(server.url)
            response = await ask(it)

            assert await response.read() == b"short"
            for _ in range(2):
                with pytest.raises(UpstreamLost, match="amid its answer"):
                    await response.read()
            assert await read(await ask(it)) == b""

            await it.aclose()
            check_at_rest(it)

    run(test())


def test_an_answer_to_its_connections_end_is_whole_only_where_the_end_is_clean() -> None:
    endings = iter(("fin", "rst"))

    async def script(served: Connection) -> None:
        await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\n\r\nall there is")
        if next(endings) == "rst":
            reset(served)

    async def test() -> None:
        async with RawServer(script) as server:
            it = engine_at(server.url)

            assert await read(await ask(it)) == b"all there is"
            with pytest.raises(UpstreamLost):
                await read(await ask(it))

            check_at_rest(it)

    run(test())


def reset(served: Connection) -> None:
    """Close with RST and not FIN."""
    its_socket = served.writer.get_extra_info("socket")
    its_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    served.reset()


STORY = (
    STREAM_HEAD.replace(b"200 OK", b"200 Fine")
    + b"".join(piece(b"data: %d\n\n" % number) for number in range(3))
    + piece(b"")
)


def test_wherever_an_answer_is_cut_in_two_it_is_the_same_and_wherever_it_ends_early_it_is_lost() -> None:
    cuts = iter([(at, lost) for at in range(1, len(STORY)) for lost in (False, True)])

    async def script(served: Connection) -> None:
        while await served.request() is not None:
            at, is_lost = next(cuts)
            await served.send(STORY[:at])
            if is_lost:
                return
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await served.send(STORY[at:])

    async def test() -> None:
        async with RawServer(script) as server:
            it = engine_at(server.url)
            for _ in range(1, len(STORY)):
                assert await read(await ask(it)) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
                with pytest.raises(UpstreamLost):
                    await read(await ask(it))
                check_at_rest(it)
            await it.aclose()

    run(test())


# -- requests -------------------------------------------------------------------------------------------------------


def test_a_request_is_one_write_and_a_large_one_goes_at_the_engines_pace() -> None:
    large = bytes(range(256)) * 40_000
    seen: list[SeenRequest] = []

    def handler(request: SeenRequest) -> bytes:
        seen.append(request)
        return answer(b"{}")

    async def test() -> None:
        async with RawServer(serve(handler)) as server:
            faults = Faulty(server.port)
            it = engine_at(server.url, connect=faults)

            await read(await ask(it))
            assert len(faults.held_bytes) == 1
            await read(await ask(it, UpstreamRequest("POST", "/v1/x", (), large)))

            assert seen[1].body == large
            assert server.connections == 1
            # What had not left this process never was more than the last piece and a transport's own high water.
            assert max(faults.held_bytes) <= wire._PIECE_BYTES + (64 << 10)
            await it.aclose()

    run(test())


@pytest.mark.parametrize("closes", [True, False])
def test_an_engine_that_refuses_before_it_has_read_the_request_is_heard(closes: bool) -> None:
    refusal = answer(b"too long", status=413)

    async def script(served: Connection) -> None:
        await served.reader.readuntil(b"\r\n\r\n")
        await served.send(refusal)
        if not closes:
            await asyncio.Event().wait()

    async def test() -> None:
        async with RawServer(script) as server:
            it = engine_at(server.url)

            response = await ask(it, UpstreamRequest("POST", "/v1/x", (), b"x" * (32 << 20)))

            assert response.status == 413
            assert await read(response) == b"too long"
            assert len(it._idle) == 0
            check_at_rest(it)

    run(test())


def test_an_engine_that_has_refused_and_closed_before_the_body_is_written_is_heard() -> None:
    refusal = answer(b"too long", status=413)

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            gone = threading.Event()

            def refuse() -> None:
                served, _ = listening.accept()
                served.recv(65536)
                served.sendall(refusal)
                served.close()
                gone.set()

            thread = threading.Thread(target=refuse)
            thread.start()
            faults = Faulty(listening.getsockname()[1])
            faults.before_a_large_write = gone.wait
            it = engine_at("http://127.0.0.1:1", connect=faults)

            response = await ask(it, UpstreamRequest("POST", "/v1/x", (), b"x" * (3 << 20)))

            assert (response.status, await read(response)) == (413, b"too long")
            check_at_rest(it)
            thread.join()

    run(test())


def test_an_engine_that_reads_nothing_of_a_large_request_ends_at_the_first_byte_limit() -> None:
    async def script(served: Connection) -> None:
        served.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport of a socket has it
        await asyncio.Event().wait()

    async def test() -> None:
        async with RawServer(script) as server:
            it = engine_at(server.url)

            with pytest.raises(UpstreamTimeout) as caught:
                await ask(it, UpstreamRequest("POST", "/v1/x", (), b"x" * (32 << 20)), first_byte_s=0.05)

            assert caught.value.phase == "first_byte"
            check_at_rest(it)

    run(test())


def test_lines_of_a_client_never_break_out_of_their_header() -> None:
    seen: list[SeenRequest] = []
    odd = (
        (b"x-a", b"1\r\nhost: evil"),
        (b"x-b", b"2\nx-evil: 1"),
        (b"x-c: 1\r\nx-evil", b"3"),
        (b"", b"4"),
        (b"x-d", b"\x004"),
        (b"x-e", b"5\r\n\r\nGET / HTTP/1.1"),
        (b"x-kept", b"\xc3\xa9\t\xff"),
    )

    def handler(request: SeenRequest) -> bytes:
        seen.append(request)
        return answer(b"{}")

    async def test() -> None:
        async with RawServer(serve(handler)) as server:
            it = engine_at(server.url)
            await read(await ask(it, UpstreamRequest("POST", "/v1/x y\r\nz: 1", odd, b"")))
            await it.aclose()

        (request,) = seen
        names = sorted(name for name, _ in request.headers)
        assert names == ["accept-encoding", "content-length", "host", "x-kept"]
        assert request.path == "/v1/x%20y%0D%0Az:%201"

    run(test())


# -- flow control and limits ----------------------------------------------------------------------------------------


def test_a_client_that_does_not_read_stops_the_engine_and_not_this_process() -> None:
    sent = 0

    async def script(served: Connection) -> None:
        nonlocal sent
        await served.request()
        await served.send(STREAM_HEAD)
        while sent < 64 << 20:
            await served.send(piece(b"x" * 65536))
            sent += 65536
        await served.send(piece(b""))
        await served.closed()

    async def test() -> None:
        async with RawServer(script) as server:
            it = engine_at(server.url)
            response = await ask(it)
            (its_wire,) = it._busy
            while not its_wire._is_paused:
                await asyncio.sleep(0)

            held = sum(map(len, response.pieces))
            assert UNREAD_MAX_BYTES - 65536 < held <= UNREAD_MAX_BYTES + 256 * 1024
            assert sent < 32 << 20

            size, most = 0, 0
            while part := await response.read():
                size += len(part)
                most = max(most, len(part))

            assert (size, sent) == (64 << 20, 64 << 20)
            assert most <= UNREAD_MAX_BYTES + 256 * 1024
            await it.aclose()

    run(test())


class InMemory(asyncio.Transport):
    """A connection without a socket, for tests whose clock jumps: the test is the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.Protocol
        self.written: list[bytes] = []
        self.is_aborted = False

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> object:
        self.protocol = protocol()
        self.protocol.connection_made(self)
        return self

    def protocol_received(self, data: bytes) -> None:
        if data:
            self.protocol.data_received(data)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


def test_each_limit_is_its_own_and_time_that_nobody_waits_does_not_count() -> None:
    async def test() -> None:
        line = InMemory()
        it = engine_at("http://x", connect=line.connect)
        loop = asyncio.get_running_loop()
        asking = asyncio.create_task(ask(it, first_byte_s=600, idle_s=60))
        await asyncio.sleep(300)
        line.protocol.data_received(STREAM_HEAD)
        response = await asking
        loop.call_later(299, line.protocol.data_received, piece(b"first"))

        assert await response.read() == b"first"
        await asyncio.sleep(1_000)
        waits_from_s = loop.time()
        with pytest.raises(UpstreamTimeout) as caught:
            await response.read()

        assert (caught.value.phase, caught.value.limit_s) == ("idle", 60)
        assert loop.time() - waits_from_s == pytest.approx(60)
        assert line.is_aborted
        check_at_rest(it)

    run_on(JumpingLoop(), test())


@pytest.mark.parametrize("head", [b"", STREAM_HEAD], ids=["no head", "head before the prefill"])
@pytest.mark.parametrize("before_s", [0.0, 30.0, 3.0])
def test_a_silent_socket_ends_at_the_first_byte_limit_wherever_the_alarm_stood(head: bytes, before_s: float) -> None:
    async def test() -> None:
        line = InMemory()
        it = engine_at("http://x", connect=line.connect)
        loop = asyncio.get_running_loop()
        # An answer before it, whose limits set the alarm of the connection elsewhere.
        loop.call_later(before_s, line.protocol_received, answer(b"{}"))
        await read(await ask(it, first_byte_s=600, idle_s=60))
        began_s = loop.time()
        loop.call_later(1, line.protocol_received, head)

        with pytest.raises(UpstreamTimeout) as caught:
            await read(await ask(it, first_byte_s=50, idle_s=3))

        assert (caught.value.phase, len(line.written)) == ("first_byte", 2)
        assert loop.time() - began_s == pytest.approx(50)
        check_at_rest(it)

    run_on(JumpingLoop(), test())


def test_a_request_that_takes_over_a_connection_in_the_tick_it_came_free_keeps_its_own_limit() -> None:
    async def test() -> None:
        line = InMemory()
        it = EngineUpstream("e", "http://x", api_key=None, connections_max=1, connect=line.connect)
        loop = asyncio.get_running_loop()
        asking = asyncio.create_task(ask(it, first_byte_s=600))
        await asyncio.sleep(1)
        line.protocol_received(STREAM_HEAD)
        first = asyncio.create_task(read(await asking))
        second = asyncio.create_task(ask(it, first_byte_s=7))
        await asyncio.sleep(1)
        line.protocol_received(piece(b"all") + piece(b""))
        taken_over_s = loop.time()
        assert await first == b"all"

        with pytest.raises(UpstreamTimeout):
            await asyncio.wait_for(second, 1_000)

        assert loop.time() - taken_over_s == pytest.approx(7)

    run_on(JumpingLoop(), test())


def test_steady_traffic_makes_no_timer_for_a_request() -> None:
    async def test() -> None:
        async with RawServer(serve(lambda _: answer(b"{}"))) as server:
            it = engine_at(server.url)
            await read(await ask(it))
            loop = asyncio.get_running_loop()
            made = 0
            call_at = loop.call_at

            def counted(*args: Any, **options: Any) -> asyncio.TimerHandle:
                nonlocal made
                made += 1
                return call_at(*args, **options)

            loop.call_at = counted  # type: ignore[method-assign]  # to count
            for _ in range(50):
                await read(await ask(it))
            loop.call_at = call_at  # type: ignore[method-assign]  # as it was

            assert made == 0
            await it.aclose()

    run(test())


def test_a_read_that_is_cancelled_loses_no_byte() -> None:
    async def script(served: Connection) -> None:
        await served.request()
        await served.send(STREAM_HEAD)
        for number in range(200):
            await served.send(piece(b"%d," % number))
            await asyncio.sleep(0)
        await served.send(piece(b""))
        await served.closed()

    async def test() -> None:
        rng = random.Random(7)
        async with RawServer(script) as server:
            it = engine_at(server.url)
            response = await ask(it)
            got: list[bytes] = []
            while True:
                reading = asyncio.create_task(response.read())
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                reading.cancel()
                await asyncio.wait({reading})
                if reading.cancelled():
                    continue
                if not reading.result():
                    break
                got.append(reading.result())

            assert b"".join(got) == b"".join(b"%d," % number for number in range(200))
            await it.aclose()

    run(test())


# -- this side fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
def test_no_socket_left_on_our_side_is_nothing_against_the_engine(code: int) -> None:
    async def connect(_: object) -> object:
        raise OSError(code, "none left")

    async def test() -> None:
        it = engine_at("http://192.0.2.1", connect=connect)
        engine = Engine(EngineConfig("e", "http://x", None, None, None), it, Clock())
        engine.see(LifecycleEvent.PROBE_OK)
        engine.see(LifecycleEvent.WORK_OK)

        for _ in range(20):
            with pytest.raises(SocketsExhausted) as caught:
                await ask(it)
            engine.note_connect_failed(caught.value)

        assert engine.status.state is EngineState.SERVING
        check_at_rest(it)

    run(test())


class Clock:
    def now_s(self) -> float:
        return 1.0

    unix_s = now_s


def test_whichever_operation_on_the_socket_fails_nothing_is_left_and_the_next_request_works() -> None:
    async def script(served: Connection) -> None:
        while (request := await served.request()) is not None:
            if request.path == "/left":
                await served.send(STREAM_HEAD + piece(b"a"))
                await served.closed()
                return
            await served.send(STREAM_HEAD)
            await served.send(piece(b"a") + piece(b""))

    async def calls(it: EngineUpstream) -> list[str]:
        outcomes: list[str] = []
        for path in ("/one", "/left", "/two"):
            response: WireResponse | None = None
            try:
                response = await ask(it, UpstreamRequest("POST", path, (), b"{}"))
                body = await response.read() if path == "/left" else await rest_of(response)
                outcomes.append(body.decode())
            except UpstreamError as error:
                outcomes.append(type(error).__name__)
            finally:
                if response is not None:
                    response.close()
        return outcomes

    async def test() -> None:
        async with RawServer(script) as server:
            fail_at, untouched = 0, False
            while not untouched:
                fail_at += 1
                faults = Faulty(server.port, fail_at)
                it = engine_at(server.url, connect=faults)

                outcomes = await calls(it)

                untouched = faults.done < fail_at
                assert len(outcomes) == 3
                assert set(outcomes) <= {"a", "ConnectFailed", "UpstreamLost"}
                assert outcomes.count("a") >= 2
                check_at_rest(it)
                faults.fail_at = 0
                assert await read(await ask(it, UpstreamRequest("POST", "/after", (), b"{}"))) == b"a"
                await it.aclose()
                while faults.open:
                    await asyncio.sleep(0)
            assert outcomes == ["a", "a", "a"]
            assert fail_at > 8

    run(test())


def test_hundreds_of_clients_that_leave_at_any_moment_leave_no_socket_behind() -> None:
    async def script(served: Connection) -> None:
        while await served.request() is not None:
            await served.send(STREAM_HEAD)
            for _ in range(5):
                await served.send(piece(b"token"))
                await asyncio.sleep(0)
            await served.send(piece(b""))

    async def client(it: EngineUpstream) -> None:
        response = await ask(it)
        try:
            await rest_of(response)
        finally:
            response.close()

    async def test() -> None:
        rng = random.Random(3)
        async with RawServer(script) as server:
            it = engine_at(server.url)
            for _ in range(40):
                tasks = [asyncio.create_task(client(it)) for _ in range(PLACES + 4)]
                for task in tasks:
                    for _ in range(rng.randrange(6)):
                        await asyncio.sleep(0)
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                check_at_rest(it)
            assert await read(await ask(it)) == b"token" * 5
            await it.aclose()
            while server._tasks:
                await asyncio.sleep(0)

    run(test())


def test_closing_while_a_read_waits_ends_the_read() -> None:
    async def script(served: Connection) -> None:
        await served.request()
        await served.send(STREAM_HEAD)
        await served.closed()

    async def test() -> None:
        async with RawServer(script) as server:
            it = engine_at(server.url)
            response = await ask(it)
            reading = asyncio.create_task(response.read())
            await asyncio.sleep(0)

            response.close()

            with pytest.raises(UpstreamLost, match="closed"):
                await reading
            check_at_rest(it)

    run(test())


def test_an_engine_with_many_seats_has_a_connection_for_each_and_some_for_probes() -> None:
    assert connection.connections_for(256) == connection.CONNECTIONS_MAX
    assert connection.connections_for(1_024) > 1_024


def test_waiting_for_a_place_is_first_come_first_served_and_a_place_given_to_a_leaver_passes_on() -> None:
    release = asyncio.Event()

    async def script(served: Connection) -> None:
        while await served.request() is not None:
            await release.wait()
            await served.send(answer(b"{}"))

    async def test() -> None:
        async with RawServer(script) as server:
            it = engine_at(server.url)
            done: list[int] = []

            async def client(number: int) -> None:
                await read(await ask(it))
                done.append(number)

            tasks = [asyncio.create_task(client(number)) for number in range(PLACES + 6)]
            while len(it._waiters) < 6:
                await asyncio.sleep(0)
            tasks[PLACES].cancel()
            release.set()
            await asyncio.sleep(0)
            tasks[PLACES + 1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

            assert [number for number in done if number >= PLACES + 2] == list(range(PLACES + 2, PLACES + 6))
            check_at_rest(it)
            await it.aclose()

    run(test())


def test_a_kept_connection_that_was_closed_in_this_very_moment_is_not_asked() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)

            async def accept() -> socket.socket:
                served, _ = await loop.sock_accept(listener)
                await loop.sock_sendall(served, answer(b"{}"))
                return served

            it = engine_at(f"http://127.0.0.1:{listener.getsockname()[1]}")
            first = asyncio.create_task(accept())
            await read(await ask(it))
            (await first).close()
            # The close lies in the socket of this side, and the loop has had no turn to tell of it.
            (kept,) = it._idle
            second = asyncio.create_task(accept())

            assert await read(await ask(it)) == b"{}"

            assert kept.is_dropped
            (await second).close()
            await it.aclose()

    run(test())


# -- TLS ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for `localhost`, in one file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    key, cert = path.with_name("key.pem"), path.with_name("cert.pem")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    path.write_bytes(key.read_bytes() + cert.read_bytes())
    return path


def test_an_engine_behind_tls_is_asked_by_its_name_and_only_if_its_certificate_is_trusted(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_names: list[str | None] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served = Connection(reader, writer, 1)
        await serve(lambda request: answer(request.all("host")[0].encode()))(served)
        writer.close()

    async def test() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        context.sni_callback = lambda _socket, name, _context: served_names.append(name)
        async with AsyncExitStack() as opened:
            server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
            opened.callback(server.close)
            port = server.sockets[0].getsockname()[1]
            distrusting = engine_at(f"https://localhost:{port}")
            trusted = ssl.create_default_context(cafile=str(certificate))
            monkeypatch.setattr(address, "_tls", lambda: trusted)
            trusting = engine_at(f"https://localhost:{port}")
            # What is trusted is read at the start, not with the first connection, which may find no file to open.
            monkeypatch.delattr(address, "_tls")

            with pytest.raises(ConnectFailed, match="CERTIFICATE_VERIFY_FAILED"):
                await ask(distrusting)
            bodies = [await read(await ask(trusting)) for _ in range(3)]

            assert bodies == [f"localhost:{port}".encode()] * 3
            assert set(served_names) == {"localhost"}
            assert len(trusting._idle) == 1
            check_at_rest(distrusting)
            await trusting.aclose()

    run(test())
