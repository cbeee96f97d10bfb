"""A prompt that kills engines: few of them, and everybody else is served."""

import asyncio

import pytest

from tests.cases.house import CaseEngine, House, house_of
from tests.http.scripted import Answering, says
from tests.http.stack import until
from tests.upstream.fakes import Connection, SeenRequest

NAMES = "cdef"


class Fleet:
    """Four engines, each of which dies of the word POISON: its connections are reset, and new ones refused."""

    def __init__(self) -> None:
        self.engines = {name: CaseEngine() for name in NAMES}
        for name in NAMES:
            self.engines[name].answering = self._answer_of(name)
        self.killed: list[str] = []
        self._dying: list[asyncio.Task[None]] = []

    def _answer_of(self, name: str) -> Answering:
        async def answering(request: SeenRequest, connection: Connection) -> None:
            if b"POISON" not in request.body:
                await says()(request, connection)
                return
            self.killed.append(name)
            connection.reset()
            self._dying.append(asyncio.create_task(self.engines[name].stop()))

        return answering

    async def back(self, house: House) -> None:
        for task in self._dying:
            await task
        for name in set(self.killed):
            await self.engines[name].start()
        await until(lambda: house.serves(*NAMES))


@pytest.mark.parametrize("allowed", [False, True], ids=["never again", "retry_started"])
@pytest.mark.parametrize("pool", ["chat", "batch"])
async def test_a_prompt_that_kills_engines_is_not_walked_through_the_fleet_and_the_others_are_served(
    pool: str, allowed: bool
) -> None:
    fleet = Fleet()
    chat, batch = (fleet.engines, {}) if pool == "chat" else ({}, fleet.engines)
    lanes = {"prefill_lanes": 8, "queue_wait_max_s": 2.0}
    async with house_of(chat=chat, batch=batch, batch_settings=lanes, model={"retry_started": allowed}) as house:
        poisoned, touched = [], []
        for _ in range(3):
            before = len(fleet.killed)
            poisoned.append(await house.chat("POISON", max_tokens=4))
            touched.append(len(fleet.killed) - before)
            others = [await house.chat(f"normal {number}", max_tokens=4) for number in range(8)]
            assert {answer.status_code for answer in others} == {200}
        await fleet.back(house)

        assert all(answer.status_code >= 400 for answer in poisoned)
        assert max(touched) <= 2
        # The same prompt again is not tried on engines that are still alive.
        assert len(fleet.killed) <= 2
