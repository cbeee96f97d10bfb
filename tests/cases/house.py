"""A whole router before as many engines as a case needs, and what has to be true again after it.

After each case: nothing in flight, no token held, every arrival ended in one outcome, no call left at an engine, no
half-closed socket, no socket or task more than before, no error logged, and a plain chat is served.
"""

import asyncio
import contextlib
import gc
import logging
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import router as router_package
from router.sim.options import SimServerOptions
from router.sim.server import RunningSim, running
from router.upstream.engine import Engine
from tests.cases.sockets import TCP_ESTABLISHED, reset, sockets, tcp_sockets
from tests.http.scrape import Metrics
from tests.http.scripted import Answering, says
from tests.http.setting import ALIAS, LONG_TOKENS, MODEL, relay_config, write_config
from tests.http.stack import Stack, router, until
from tests.http.wire import Wire
from tests.upstream.fakes import Connection, FakeEngine, RawServer, SeenRequest

#: Where the router's code is; the simulator in it is outside of the router.
ROUTER = str(Path(router_package.__file__).parent)
SIMULATOR = str(Path(ROUTER) / "sim")
#: So soon everything has to be back.
AFTER_S = 5.0


class CaseEngine:
    """A healthy engine whose answers to clients are a test's; it knows what it has in hand, and what was taken back.

    `answering` plays each call of a client. While `is_mute`, nothing at all is answered, connections are still taken.
    """

    def __init__(
        self, answering: Answering | None = None, *, max_model_len: int = LONG_TOKENS, capacity_tokens: int = 65_536
    ) -> None:
        self.answering = answering or says()
        self.calls: list[SeenRequest] = []
        self.in_hand = 0
        #: Calls whose connection the router closed before their answer was complete.
        self.taken_back = 0
        self.is_mute = False
        #: The router's ports on the connections that calls came on.
        self.call_ports: set[int] = set()
        #: Whether a connection is kept for the next request. If not, nothing says so but its end.
        self.keeps = True
        self.healthy = FakeEngine(names=(MODEL,), max_model_len=max_model_len, capacity_tokens=capacity_tokens)
        self._server: RawServer | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.port

    async def start(self) -> None:
        """Listen; again on the port it had, where it had one."""
        server = RawServer(self.play)
        server.port = 0 if self._server is None else self._server.port
        self._server = await server.__aenter__()

    async def stop(self) -> None:
        """Every connection is reset, and new ones are refused."""
        if self._server is not None:
            await self._server.__aexit__()

    async def play(self, connection: Connection) -> None:
        try:
            while (request := await connection.request()) is not None:
                if self.is_mute:
                    await connection.closed()
                    return
                if request.all("x-request-id") or request.all("x-router-hop"):
                    await self._call(request, connection)
                else:
                    await connection.send(await self.healthy.handle(request))
                if not self.keeps or connection.writer.transport.is_closing():
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass

    async def _call(self, request: SeenRequest, connection: Connection) -> None:
        self.calls.append(request)
        self.call_ports.add(connection.writer.get_extra_info("peername")[1])
        self.in_hand += 1
        try:
            await self.answering(request, connection)
        finally:
            self.in_hand -= 1

    async def until_taken_back(self, connection: Connection) -> None:
        """For an answer that does not end by itself: returns once the router has closed its connection."""
        await connection.closed()
        self.taken_back += 1
        connection.writer.close()


Kind = CaseEngine | SimServerOptions


class Log(logging.Handler):
    """Errors and tracebacks, whoever logs them."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.errors: list[str] = []
        self.lines: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record)
        if record.levelno >= logging.ERROR or record.exc_info:
            self.errors.append(f"{record.name}: {record.getMessage()} {record.exc_info or ''}")

    @contextlib.contextmanager
    def listening(self) -> "Iterator[Log]":
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield self
        finally:
            root.removeHandler(self)


@dataclass
class House(Stack):
    """A `Stack` with engines by name, the log of its time, and the state in which it began."""

    engines: dict[str, CaseEngine] = field(default_factory=dict)
    log: Log = field(default_factory=Log)
    chats: bool = True
    sockets_before: int = 0
    tasks_before: Counter[str] = field(default_factory=Counter)

    @property
    def ports(self) -> set[int]:
        engines = (engine.port for engine in self.engines.values())
        return {*engines, *(int(sim.url.rpartition(":")[2]) for sim in self.sims.values())}

    def engine(self, name: str) -> Engine:
        """What the router knows of it."""
        return next(service.flow.engines[name] for service in self.runtime.state.models if name in service.flow.engines)

    def serves(self, *names: str) -> bool:
        return all(self.engine(name).status.can_serve for name in names)

    async def outcomes_of(self, act: Callable[[], Awaitable[Any]]) -> dict[str, int]:
        """How the calls that `act` makes end, once all have."""
        before = await self.metrics()
        await act()
        await until(lambda: self.runtime.state.in_flight == 0)
        after = await self.metrics()
        return ended(before, after)

    async def check_after(self) -> None:
        """See the head of this file."""
        await self.check_at_rest(chats=self.chats)
        await self._until("calls at engines", lambda: sum(engine.in_hand for engine in self.engines.values()))
        await self._until(
            "half-closed sockets", lambda: sockets(self.ports).total() - sockets(self.ports)[TCP_ESTABLISHED]
        )
        await self._until("new tasks", lambda: tasks() - self.tasks_before)
        await self._until("new sockets", lambda: max(0, self._sockets() - self.sockets_before))
        assert self.log.errors == []

    async def _until(self, what: str, left: Callable[[], object]) -> None:
        """Wait until there is nothing `left`; says what there was where it takes too long."""
        try:
            async with asyncio.timeout(AFTER_S):
                await until(lambda: not left())
        except TimeoutError:
            raise AssertionError(f"{what} after the test: {left()}") from None

    def note_start(self) -> None:
        self.sockets_before = self._sockets()
        self.tasks_before = tasks()

    def _sockets(self) -> int:
        """TCP sockets of this process, but for connections that are kept for the next request: to engines, whose calls
        are over by then, and of the test's own client."""
        return len(tcp_sockets()) - sockets(self.ports | {self.port})[TCP_ESTABLISHED]


def tasks() -> Counter[str]:
    """The router's own tasks by what they run; the simulator is outside of it."""
    found: Counter[str] = Counter()
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        if code is not None and code.co_filename.startswith(ROUTER) and not code.co_filename.startswith(SIMULATOR):
            found[code.co_qualname if hasattr(code, "co_qualname") else code.co_name] += 1
    return found


def ended(before: Metrics, after: Metrics) -> dict[str, int]:
    """Outcomes between two scrapes, those that are not 0."""
    name, seen = "router_requests_total", before.by("router_requests_total", "outcome")
    counts = {outcome: int(value - seen.get(outcome, 0)) for outcome, value in after.by(name, "outcome").items()}
    arrived = after.value("router_arrivals_total") - before.value("router_arrivals_total")
    assert arrived == sum(counts.values()), "each arrival ends in one outcome"
    return {outcome: count for outcome, count in counts.items() if count}


def pools(
    chat: Iterable[str], batch: Iterable[str], chat_settings: Mapping[str, Any], batch_settings: Mapping[str, Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if names := list(chat):
        found["chat"] = {"engines": names, "max_model_len": 4_096, "max_num_seqs": 64, **chat_settings}
    if names := list(batch):
        found["batch"] = {"engines": names, "max_model_len": LONG_TOKENS, "max_num_seqs": 8, **batch_settings}
    return found


@contextlib.asynccontextmanager
async def house_of(
    *,
    chat: Mapping[str, Kind] | None = None,
    batch: Mapping[str, Kind] | None = None,
    relay: Kind | None = None,
    relay_settings: Mapping[str, Any] | None = None,
    chat_settings: Mapping[str, Any] | None = None,
    batch_settings: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    chats: bool = True,
    **sections: Any,
) -> AsyncIterator[House]:
    """A router before the engines of a chat and a batch pool (C and L unless given), all of which serve; nobody
    borrows unless `model` says so. Checked at its end; `chats`: a plain chat is served then."""
    chat = {"c": CaseEngine()} if chat is None else chat
    batch = {"l": CaseEngine()} if batch is None else batch
    kinds = {**chat, **batch} | ({} if relay is None else {"x": relay})
    engines = {name: kind for name, kind in kinds.items() if isinstance(kind, CaseEngine)}
    sims: dict[str, RunningSim] = {}
    log = Log()
    async with contextlib.AsyncExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="router-case-")))
        for engine in engines.values():
            opened.push_async_callback(engine.stop)
            await engine.start()
        for name, kind in kinds.items():
            if isinstance(kind, SimServerOptions):
                sims[name] = await opened.enter_async_context(running(kind))
        urls = {name: engines[name].url if name in engines else sims[name].url for name in kinds}
        if relay is not None:
            sections["relays"] = [relay_config(urls.pop("x"), **(relay_settings or {}))]
        shape = {
            "name": MODEL,
            "aliases": [ALIAS],
            "pools": pools(chat, batch, chat_settings or {}, batch_settings or {}),
            "borrow": False,
            **({"threshold_tokens": 1_024} if chat and batch else {}),
            **(model or {}),
        }
        key = next((each["key"] for each in sections.get("keys", ())), None)
        sections["server"] = {"port": 0, **sections.get("server", {})}
        config = write_config(folder, urls, models=[shape], **sections)
        opened.enter_context(log.listening())
        stack = await opened.enter_async_context(router(config, serving=set(urls), key=key))
        stack.sims.update(sims)
        house = House(**vars(stack), engines=engines, log=log, chats=chats)
        await house.get("/healthz")
        house.note_start()
        yield house
        await house.check_after()


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """What is here already is left out of garbage collections: with a whole test session's objects one takes longer
    than the limits under test."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def sent(house: Stack, data: bytes) -> Wire:
    """A connection of its own on which `data` is out; the caller closes it."""
    wire = Wire(house.port)
    await wire.__aenter__()
    await wire.send(data)
    return wire


async def leave(wire: Wire, how: str) -> None:
    """The client goes: with a FIN (`close`) or a RST (`reset`)."""
    if how == "reset":
        reset(wire.writer)
    await wire.__aexit__(None, None, None)
