"""Turns of one conversation meet the cache of the engine that has seen it, as long as that engine has room."""

import asyncio
from typing import Any

from tests.cases.house import CaseEngine, House, house_of
from tests.http.scripted import says
from tests.http.stack import until
from tests.upstream.fakes import Connection, SeenRequest

#: Before anything was learned of the tokenizer these prompts may look long.
ALL_CHAT = {"threshold_tokens": 4_096}
WORDS = "The quick brown fox jumps over the lazy dog. " * 40


def body_of(name: str, number: int, *more: str) -> dict[str, Any]:
    """The conversation of `name` up to its `number`th question, and what it says after that."""
    messages = [{"role": "system", "content": f"{name}: {WORDS}"}]
    for turn in range(number):
        messages += [
            {"role": "user", "content": f"question {turn}"},
            {"role": "assistant", "content": f"answer {turn}"},
        ]
    for text in (f"question {number}", *more):
        messages.append({"role": "user", "content": text})
    return {"model": "llama", "messages": messages, "max_tokens": 8}


async def engine_of(house: House, name: str, number: int, *more: str) -> str:
    answer = await house.post("/v1/chat/completions", body_of(name, number, *more))
    assert answer.status_code == 200
    return str(answer.headers["x-router-engine"])


async def test_turns_of_a_conversation_go_to_one_engine_and_conversations_to_several() -> None:
    names = [f"user {number}" for number in range(12)]
    async with house_of(chat={name: CaseEngine() for name in "cde"}, model=ALL_CHAT) as house:
        seen = {name: {await engine_of(house, name, number) for number in range(5)} for name in names}

        assert {name: len(engines) for name, engines in seen.items()} == dict.fromkeys(names, 1)
        assert len(set.union(*seen.values())) > 1


async def test_a_shared_system_prompt_meets_its_cache() -> None:
    async with house_of(chat={name: CaseEngine() for name in "cde"}, model=ALL_CHAT) as house:
        seen = {await engine_of(house, "everybody", 0, f"person {number}") for number in range(12)}

        assert len(seen) == 1


async def test_a_conversation_whose_engine_is_full_or_gone_goes_on_at_another() -> None:
    may_end = asyncio.Event()

    async def held(request: SeenRequest, connection: Connection) -> None:
        if b"hold" in request.body:
            await may_end.wait()
        await says()(request, connection)

    engines = {name: CaseEngine(held) for name in "cd"}
    settings = {"max_num_seqs": 4, "ttft_target_s": 100.0}
    async with house_of(chat=engines, chat_settings=settings, model=ALL_CHAT) as house:
        home = await engine_of(house, "user", 0)
        holders = [
            asyncio.create_task(house.post("/v1/chat/completions", body_of("user", 0, f"hold {n}"))) for n in range(7)
        ]
        await until(lambda: sum(engine.in_hand for engine in engines.values()) == 7)
        loads = sorted(engine.in_hand for engine in engines.values())
        elsewhere = await engine_of(house, "user", 1)
        may_end.set()
        await asyncio.gather(*holders)
        await engines[home].stop()
        await until(lambda: not house.serves(home))
        after = await engine_of(house, "user", 2)
        await engines[home].start()
        await until(lambda: house.serves(home))

        assert loads == [3, 4]
        assert elsewhere in engines
        assert after != home
