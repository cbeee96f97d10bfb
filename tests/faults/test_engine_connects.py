"""The Nth connection to an engine cannot be made, for N = 1, 2, 3 ... until a run passes untouched: nothing was sent,
so another engine is tried, the client sees an answer or a 503, and nothing is left behind."""

import asyncio
import errno
from collections.abc import Callable, Set
from typing import Any

import httpx
import pytest
import uvloop

from tests.cases.house import House, house_of
from tests.faults.faulty import STREAMED, FaultyEngine, check, run
from tests.http.scripted import COMPLETION
from tests.http.setting import MODEL, chat_body, outside_sim

RUNS_MAX = 40
#: `None`: neither made nor refused, until `connect_s` is over.
ERRORS: dict[str, Callable[[], OSError] | None] = {
    "refused": lambda: ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
    "no route": lambda: OSError(errno.EHOSTUNREACH, "No route to host"),
    "no files left": lambda: OSError(errno.EMFILE, "Too many open files"),
    "reset": lambda: ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "silence": None,
}
LIMITS = {"timeouts": {"connect_s": 0.3}, "max_num_seqs": 4}
CALLS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "chat": ("/v1/chat/completions", chat_body(max_tokens=2), COMPLETION),
    "chat stream": ("/v1/chat/completions", chat_body(max_tokens=2, stream=True), STREAMED),
    "batch": ("/v1/completions", {"model": MODEL, "prompt": [1] * 1_500, "max_tokens": 2}, COMPLETION),
}


class FaultyLoop(uvloop.Loop):
    """The Nth connection to one of `ports` that a call makes fails as told. `calls`: the tasks of the router's calls;
    its probes connect too, whenever they come, and are left alone."""

    ports: frozenset[int] = frozenset()
    calls: Set[asyncio.Task[None]] = frozenset()
    fail_at = 0
    connects = 0
    error: Callable[[], OSError] | None = None

    def watch(self, house: House, *ports: int) -> None:
        """Fail connections of the calls of `house`; to all of its engines unless `ports` are given."""
        self.ports, self.calls = frozenset(ports or house.ports), house.runtime.state.tasks

    def arm(self, fail_at: int, error: Callable[[], OSError] | None) -> None:
        self.fail_at, self.connects, self.error = fail_at, 0, error

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        if self.fail_at and port in self.ports and asyncio.current_task() in self.calls:
            self.connects += 1
            if self.connects == self.fail_at:
                await self._fail()
        return await super().create_connection(protocol_factory, host, port, **options)

    async def _fail(self) -> None:
        if self.error is None:
            await asyncio.Event().wait()
        else:
            await asyncio.sleep(0)
            raise self.error()


def loop() -> FaultyLoop:
    """The one that runs."""
    running = asyncio.get_running_loop()
    assert isinstance(running, FaultyLoop)
    return running


async def walk(house: House, call: str, error: Callable[[], OSError] | None, *, statuses: set[int]) -> int:
    """A run for each connection that a call takes; how many there were before one passed untouched."""
    path, body, whole = CALLS[call]
    loop().watch(house)
    for at in range(1, RUNS_MAX):
        loop().arm(at, error)
        answered = await house.post(path, body)
        has_failed = loop().connects >= at
        loop().arm(0, None)
        await check(house)
        assert answered.status_code in statuses
        assert (answered.content == whole) == (answered.status_code == 200)
        if not has_failed:
            return at - 1
    raise AssertionError("no run passed untouched")


def pools_of(call: str, engines: list[FaultyEngine]) -> dict[str, Any]:
    named = dict(zip("cd", engines, strict=False))
    limits = {"chat_settings": LIMITS, "batch_settings": LIMITS | {"prefill_lanes": 2}}
    return limits | ({"chat": named, "batch": {}} if "chat" in call else {"chat": {}, "batch": named})


@pytest.mark.parametrize("call", CALLS)
def test_a_connection_that_cannot_be_made_is_made_to_another_engine(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Batch is sent again after so long, to whichever engine.
    monkeypatch.setattr("router.flow.attempt._BATCH_PAUSE_S", 0.02)

    async def test() -> None:
        engines = [FaultyEngine(keeps=False), FaultyEngine(keeps=False)]
        async with house_of(**pools_of(call, engines)) as house:
            for error in ERRORS.values():
                connections = await walk(house, call, error, statuses={200})

                assert connections == 1
            page = await house.metrics()
            assert page.value("router_attempts_total", result="connect_failed") == len(ERRORS)
            assert sum(len(engine.calls) for engine in engines) == page.value(
                "router_attempts_total", result="answered"
            )

    run(test, FaultyLoop)


@pytest.mark.parametrize("call", ["chat", "chat stream"])
def test_a_connection_that_cannot_be_made_to_the_only_engine_is_a_503(call: str) -> None:
    async def test() -> None:
        async with house_of(**pools_of(call, [FaultyEngine(keeps=False)])) as house:
            loop().watch(house)
            for error in ERRORS.values():
                refused = await told(house, call, error)

                assert refused.status_code == 503
                assert refused.json()["error"]["code"] in ("engine_unreachable", "no_engine_available")
                assert 1 <= int(refused.headers["retry-after"]) <= 60

    run(test, FaultyLoop)


@pytest.mark.parametrize("call", ["chat", "chat stream"])
def test_a_connection_that_cannot_be_made_to_the_only_engine_goes_to_the_relay(call: str) -> None:
    async def test() -> None:
        async with house_of(**pools_of(call, [FaultyEngine(keeps=False)]), relay=outside_sim()) as house:
            loop().watch(house, house.engines["c"].port)
            for error in ERRORS.values():
                answered = await told(house, call, error)

                assert answered.status_code == 200
            assert len(house.entries("x")) == len(ERRORS)

    run(test, FaultyLoop)


async def told(house: House, call: str, error: Callable[[], OSError] | None) -> httpx.Response:
    """The answer to a call whose first connection fails."""
    path, body, _ = CALLS[call]
    loop().arm(1, error)
    answered = await house.post(path, body)
    loop().arm(0, None)
    await check(house)
    return answered


def test_a_client_that_leaves_while_the_connection_is_being_made_leaves_no_socket_behind() -> None:
    async def test() -> None:
        async with house_of(**pools_of("chat", [FaultyEngine(keeps=False)])) as house:
            path, body, _ = CALLS["chat"]
            loop().watch(house)
            for _ in range(5):
                loop().arm(1, None)
                call = asyncio.create_task(house.post(path, body))
                async with asyncio.timeout(5):
                    while loop().connects == 0:
                        await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait({call})
                loop().arm(0, None)
                await check(house)

    run(test, FaultyLoop)
