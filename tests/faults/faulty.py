"""An engine whose sockets fail at the Nth operation, and what is looked at after each run.

Operations are, in order: the connection is accepted, each read of up to `READ_BYTES` of a request, each piece of an
answer that is written, the end. The fault takes the place of the Nth.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from enum import StrEnum
from typing import Any, TypeVar

import pytest
import uvloop

from router.upstream.health import ProbeTimes
from tests.cases.house import CaseEngine, House, short_collections
from tests.cases.sockets import reset
from tests.http.scripted import COMPLETION, DONE, chunk
from tests.upstream.fakes import STREAM_HEAD, Connection, SeenRequest, piece

T = TypeVar("T")

#: A bound on a hung test, not a measurement.
GUARD_S = 30.0
#: Small enough for several reads of a small request.
READ_BYTES = 128
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}\n\n'
COMPLETION_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(COMPLETION)
EVENTS = (chunk("one"), b": a comment\n\n", chunk("two"), USAGE, DONE)
#: What a client that did not ask for usage gets.
STREAMED = b"".join(event for event in EVENTS if event is not USAGE)


class Fault(StrEnum):
    RESET = "reset"
    CLOSE = "close"
    #: Its sending side alone.
    HALF_CLOSE = "half close"
    STALL = "stall"
    #: Bytes that are no HTTP.
    GARBAGE = "garbage"


class _Failed(Exception):
    """The armed operation came."""


class FaultyEngine(CaseEngine):
    """Healthy, but for one fault at operation `fail_at` once `arm` was called. Without `keeps`, each call has a
    connection of its own, so that accepting is an operation too."""

    def __init__(self, *, keeps: bool, read_bytes: int = READ_BYTES) -> None:
        super().__init__()
        self.keeps = keeps
        self.fault = Fault.RESET
        self.fail_at = 0
        self.operations = 0
        self.has_failed = False
        self.on_failure: Callable[[], None] = lambda: None
        self._read_bytes = read_bytes
        #: Cleared, it holds calls back that were read.
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        #: Calls answered whole.
        self.answered = 0

    def arm(self, fault: Fault, fail_at: int) -> None:
        self.fault, self.fail_at, self.operations, self.has_failed = fault, fail_at, 0, False

    def disarm(self) -> None:
        self.fail_at = 0

    async def play(self, connection: Connection) -> None:
        try:
            self._step()
            while await self._exchange(connection) and self.keeps:
                pass
        except _Failed:
            await self._fail(connection)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass

    def _step(self) -> None:
        self.operations += 1
        if self.operations == self.fail_at:
            self.has_failed = True
            self.on_failure()
            raise _Failed

    async def _fail(self, connection: Connection) -> None:
        with contextlib.suppress(ConnectionError):
            if self.fault is Fault.RESET:
                reset(connection.writer)
            elif self.fault is Fault.CLOSE:
                connection.writer.close()
            elif self.fault is Fault.HALF_CLOSE:
                connection.writer.write_eof()
                await connection.closed()
            elif self.fault is Fault.GARBAGE:
                await connection.send(b"\x00\xff\r\n\r\nnonsense\r\n")
                await connection.closed()
            else:
                await connection.closed()

    async def _exchange(self, connection: Connection) -> bool:
        """One request and its answer; False where the peer has closed."""
        request = await self._request(connection)
        if request is None:
            return False
        if not request.all("x-request-id"):
            said = await self.healthy.handle(request)
            await connection.send(said if self.keeps else said.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
            return True
        self.calls.append(request)
        self.in_hand += 1
        try:
            await self.may_answer.wait()
            is_stream = b'"stream": true' in request.body or b'"stream":true' in request.body
            for part in answer_pieces(is_stream=is_stream, keeps=self.keeps):
                self._step()
                await connection.send(part)
                # Whoever reads gets its turn: each piece is a read of its own there.
                await asyncio.sleep(0)
            self.answered += 1
            if self.fault is not Fault.STALL:
                self._step()
        finally:
            self.in_hand -= 1
        return True

    async def _request(self, connection: Connection) -> SeenRequest | None:
        """Read piece by piece. Only requests of clients, which are posted, count."""
        data = b""
        while b"\r\n\r\n" not in data:
            part = await connection.reader.read(self._read_bytes)
            if not part:
                return None
            data += part
            if data.startswith(b"POST"):
                self._step()
        head, _, body = data.partition(b"\r\n\r\n")
        line, *rest = head.decode("latin-1").split("\r\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (field.partition(":") for field in rest)]
        size = sum(int(value) for name, value in headers if name == "content-length")
        while len(body) < size:
            part = await connection.reader.read(min(self._read_bytes, size - len(body)))
            if not part:
                return None
            body += part
            self._step()
        return SeenRequest(line, headers, body)


def answer_pieces(*, is_stream: bool, keeps: bool) -> Iterator[bytes]:
    """A whole answer, cut in the middle of its head, of its body or of two of its chunks, and between its chunks.
    Without `keeps` it says that its connection ends with it."""
    head = STREAM_HEAD if is_stream else COMPLETION_HEAD
    yield head[:30]
    yield head[30:] if keeps else head[30:-2] + b"connection: close\r\n\r\n"
    if not is_stream:
        yield COMPLETION[:50]
        yield COMPLETION[50:]
        return
    for event in EVENTS:
        whole = piece(event)
        cut = len(whole) // 2 if event in (EVENTS[0], USAGE) else 0
        yield from filter(None, (whole[:cut], whole[cut:]))
    yield piece(b"")


def run(
    test: Callable[[], Coroutine[Any, Any, T]], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> T:
    """Run the body of a test on a loop like the router's own, bounded, with probes out of the way."""

    async def bounded() -> T:
        async with asyncio.timeout(GUARD_S):
            return await test()

    # Long intervals: probes come where traffic asks for one, and else hardly ever among the operations.
    times = ProbeTimes(interval_s=5.0, again_s=0.01, connect_s=0.5, health_s=0.5, work_s=0.5, work_pause_max_s=0.02)
    with (
        short_collections(),
        pytest.MonkeyPatch.context() as patch,
        asyncio.Runner(loop_factory=loop_factory or uvloop.new_event_loop) as runner,
    ):
        patch.setattr("router.upstream.health.ProbeTimes", lambda: times)
        # A plain answer that does not come is given up as soon as a stream's first byte.
        patch.setattr("router.flow.attempt._S_PER_OUTPUT_TOKEN", 0.0)
        return runner.run(bounded())


async def check(house: House) -> None:
    """What each run leaves behind: nothing. Engines are disarmed, and their failures are forgotten, as if they had
    served others since: nothing of a run decides the next."""
    for name, engine in house.engines.items():
        if isinstance(engine, FaultyEngine):
            engine.disarm()
            house.engine(name).note_request_ok()
    async with asyncio.timeout(GUARD_S / 2):
        while not house.serves(*house.engines):
            await asyncio.sleep(0.005)
    await house.check_after()
