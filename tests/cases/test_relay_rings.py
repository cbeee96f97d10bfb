"""Relays that lead back here, over one router or two: the circle ends after one turn, without a flood of log lines."""

import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from router.observe.log import JsonFormatter
from tests.cases.house import CaseEngine, House, house_of
from tests.http.stack import until
from tests.upstream.fakes import Connection, SeenRequest, answer

CALLS = 10
ATTEMPTS_MAX = 3


class Forwarder(CaseEngine):
    """A relay that is another router's front door: what it is sent goes there under the model's name of there."""

    def __init__(self) -> None:
        super().__init__(self._forward)
        self.target = ""

    async def _forward(self, seen: SeenRequest, connection: Connection) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            reply = await client.post(
                f"{self.target}{seen.path}",
                content=seen.body.replace(b"vendor/big-1", b"llama"),
                headers=[(name, value) for name, value in seen.headers if name in ("content-type", "x-router-hop")],
            )
        await connection.send(answer(reply.content, status=reply.status_code))


@contextlib.asynccontextmanager
async def ring(size: int) -> AsyncIterator[tuple[list[House], list[Forwarder]]]:
    """Routers in a circle, all of whose engines are down."""
    forwarders = [Forwarder() for _ in range(size)]
    async with contextlib.AsyncExitStack() as opened:
        houses = [
            await opened.enter_async_context(
                house_of(relay=forwarder, chats=False, model={"attempts_max": ATTEMPTS_MAX})
            )
            for forwarder in forwarders
        ]
        for number, forwarder in enumerate(forwarders):
            forwarder.target = houses[(number + 1) % size].url
        for house in houses:
            for name in "cl":
                await house.engines[name].stop()
            await until(lambda house=house: not house.serves("c") and not house.serves("l"))  # type: ignore[misc]  # bound
        yield houses, forwarders


@pytest.mark.parametrize("size", [1, 2], ids=["one router", "two routers"])
async def test_a_circle_of_relays_ends_after_one_turn_and_says_little(size: int) -> None:
    async with ring(size) as (houses, forwarders):
        first = houses[0]
        lines_before = len(first.log.lines)
        answers = [await first.chat(max_tokens=2) for _ in range(CALLS)]
        healthy = await first.get("/healthz")
        stops = sum([(await house.metrics()).value("router_relay_loops_total") for house in houses])
        logged = "".join(JsonFormatter().format(line) for line in first.log.lines[lines_before:])

        assert {each.status_code for each in answers} <= {429, 502, 503}
        assert all(each.json()["error"]["message"] for each in answers)
        assert sum(len(forwarder.calls) for forwarder in forwarders) <= CALLS * (1 + ATTEMPTS_MAX)
        assert 1 <= stops <= CALLS
        assert healthy.status_code == 200
        assert len(logged) < 5_000 * CALLS
