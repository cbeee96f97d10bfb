"""A prompt that kills engines reaches two of them, whatever its client tries; everybody else is served."""

import asyncio
from typing import Any

import pytest

from router.flow.job import Refusal
from router.policy.lifecycle import EngineState, LifecycleEvent
from router.policy.outcome import Outcome
from router.upstream.api import UpstreamLost
from tests.flow.stack import BATCH, CHAT, Stack, body_of, fresh, rest_of, run
from tests.upstream.fakes import STREAM_HEAD, Connection, Script, answer, piece, serve

POISON = body_of("POISON", max_tokens=4, stream=True)
WELL = body_of("Hello.", max_tokens=4)
ANSWER = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}]}'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"yes"},"finish_reason":null}]}\n\n'


def mortal(seen: list[bytes]) -> Script:
    """An engine that drops its connection on poison and answers anything else."""

    async def script(connection: Connection) -> None:
        while (request := await connection.request()) is not None:
            seen.append(request.body)
            if b"POISON" in request.body:
                connection.reset()
                return
            await connection.send(answer(ANSWER))

    return script


async def refused(stack: Stack, body: dict[str, Any], **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as found:
        await stack.send(stack.job(fields.pop("request_class", CHAT), body=body, **fields))
    return found.value


def go_down(stack: Stack, name: str) -> None:
    """What the monitor sees of a process that is gone."""
    for _ in range(2):
        stack.engines[name].see(LifecycleEvent.PROBE_REFUSED)


def four(seen: list[bytes]) -> dict[str, Script]:
    return {f"e{number}": mortal(seen) for number in range(4)}


@pytest.mark.parametrize("request_class", [CHAT, BATCH])
def test_a_prompt_sent_again_and_again_touches_two_engines_of_four(request_class: Any) -> None:
    async def test() -> None:
        seen: list[bytes] = []
        pool = four(seen)
        async with fresh(chat=pool, batch=pool) as stack:
            ends = [await refused(stack, POISON, request_class=request_class) for _ in range(5)]

            assert [end.error.status for end in ends] == [502, 502, 422, 422, 422]
            assert ends[2].outcome is Outcome.REFUSED_QUARANTINED
            assert ends[2].error.code == "prompt_quarantined"
            assert sum(b"POISON" in body for body in seen) == 2
            assert sum(stack.attempts().values()) == 2

    run(test())


def test_others_are_served_meanwhile() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        async with fresh(chat=four(seen), batch={}) as stack:
            for _ in range(3):
                await refused(stack, POISON)
                answered, _ = await stack.send(stack.job(body=WELL))
                assert answered.status == 200

    run(test())


def test_the_quarantine_outlasts_engines_that_come_back() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        async with fresh(chat=four(seen), batch={}) as stack:
            for _ in range(2):
                await refused(stack, POISON)
                dead = stack.records[-1].engine
                assert dead is not None
                go_down(stack, dead)
                assert stack.engines[dead].status.state is EngineState.DOWN
            stack.all_serve()
            for name in stack.engines:
                stack.engines[name].note_request_ok()

            assert (await refused(stack, POISON)).error.status == 422

    run(test())


def test_losses_of_engines_that_give_tokens_again_hold_nobody() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        async with fresh(chat=four(seen), batch={}) as stack:
            for _ in range(2):
                await refused(stack, POISON)
            for engine in stack.engines.values():
                engine.note_request_ok()

            assert (await refused(stack, POISON)).error.status == 502

    run(test())


def test_losses_of_engines_that_are_reached_and_well_are_nobodys_death() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        async with fresh(chat={"e1": mortal(seen), "e2": mortal(seen)}, batch={}) as stack:
            for name in ("e1", "e2"):
                # What cuts long prefills in front of a healthy engine: three in a row take it out.
                for number in range(3):
                    await refused(stack, POISON if number == 0 else body_of(f"POISON {name} {number}"), only=name)
                assert stack.engines[name].status.state is EngineState.DOWN
                stack.engines[name].see(LifecycleEvent.PROBE_OK)
            stack.all_serve()

            assert (await refused(stack, POISON)).error.status == 502

    run(test())


@pytest.mark.parametrize("sign", [LifecycleEvent.PROBE_REFUSED, LifecycleEvent.PROBE_FAILED])
def test_an_engine_out_for_its_losses_has_died_once_a_probe_fails_too(sign: LifecycleEvent) -> None:
    async def test() -> None:
        seen: list[bytes] = []
        async with fresh(chat={"e1": mortal(seen), "e2": mortal(seen)}, batch={}) as stack:
            for name in ("e1", "e2"):
                for number in range(3):
                    await refused(stack, POISON if number == 0 else body_of(f"POISON {name} {number}"), only=name)
                stack.engines[name].see(sign)
            stack.all_serve()

            assert (await refused(stack, POISON)).error.status == 422

    run(test())


def test_an_engine_that_was_going_anyway_did_not_die_of_it() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        gone: list[str] = []

        def leaving(name: str) -> Script:
            async def script(connection: Connection) -> None:
                while (request := await connection.request()) is not None:
                    seen.append(request.body)
                    gone.append(name)
                    stack.engines[name].drain()
                    connection.reset()
                    return

            return script

        async with fresh(chat={name: leaving(name) for name in ("e1", "e2", "e3")}, batch={}) as stack:
            ends = [await refused(stack, POISON) for _ in range(3)]

            assert [end.error.status for end in ends] == [502, 502, 502]
            assert sorted(gone) == ["e1", "e2", "e3"]

    run(test())


def test_one_request_that_may_be_sent_twice_kills_two_and_is_known_then() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        async with fresh(chat=four(seen), batch={}, retry_started=True, attempts_max=5) as stack:
            first = await refused(stack, POISON)
            second = await refused(stack, POISON)

            assert (first.error.status, second.error.status) == (502, 422)
            assert len(seen) == 2

    run(test())


def test_a_token_clears_the_prompt() -> None:
    async def test() -> None:
        calls = 0

        async def script(connection: Connection) -> None:
            nonlocal calls
            while await connection.request() is not None:
                calls += 1
                if calls == 2:
                    await connection.send(answer(ANSWER))
                else:
                    connection.reset()
                    return

        async with fresh(chat={"e1": script, "e2": script, "e3": script}, batch={}) as stack:
            assert (await refused(stack, WELL)).error.status == 502
            answered, _ = await stack.send(stack.job(body=WELL))
            again = [(await refused(stack, WELL)).error.status for _ in range(2)]

            assert answered.status == 200
            assert again == [502, 502]

    run(test())


def test_a_first_token_that_comes_after_the_headers_had_to_go_out_clears_the_prompt_too() -> None:
    async def test() -> None:
        calls = 0
        release = asyncio.Event()

        async def script(connection: Connection) -> None:
            nonlocal calls
            while await connection.request() is not None:
                calls += 1
                if calls != 2:
                    connection.reset()
                    return
                await connection.send(STREAM_HEAD + piece(b": queued\n\n"))
                await release.wait()
                await connection.send(piece(TOKEN) + piece(b""))

        async with fresh(chat={"e1": script, "e2": script}, batch={}, commit_after_s=0.01) as stack:
            assert (await refused(stack, POISON)).error.status == 502
            answer = await stack.flow.send(stack.job(body=POISON), stack.record())
            release.set()
            with answer:
                streamed = await rest_of(answer)
            again = [(await refused(stack, POISON)).error.status for _ in range(2)]

            assert streamed.endswith(TOKEN)
            assert again == [502, 502]

    run(test())


def test_an_answer_of_a_relay_clears_nothing() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        relay = serve(lambda _: answer(ANSWER))
        async with fresh(chat={"e1": mortal(seen), "e2": mortal(seen)}, batch={}, relay=relay) as stack:
            assert (await refused(stack, POISON)).error.status == 502
            dead = stack.records[-1].engine
            (alive,) = stack.engines.keys() - {dead}
            go_down(stack, str(dead))
            stack.engines[alive].drain()
            relayed, _ = await stack.send(stack.job(body=POISON))
            stack.engines[alive].undrain()
            stack.engines[alive].see(LifecycleEvent.WORK_OK)
            ends = [(await refused(stack, POISON)).error.status for _ in range(2)]

            assert relayed.record.relay == "x"
            assert ends == [502, 422]

    run(test())


def test_an_engine_lost_after_the_headers_had_to_go_out_and_before_a_token_counts_too() -> None:
    async def test() -> None:
        release = asyncio.Event()

        async def script(connection: Connection) -> None:
            while await connection.request() is not None:
                await connection.send(STREAM_HEAD)
                await connection.send(piece(b": queued\n\n"))
                await release.wait()
                connection.reset()
                return

        async with fresh(chat={"e1": script, "e2": script}, batch={}, commit_after_s=0.01) as stack:
            for _ in range(2):
                release.clear()
                answer = await stack.flow.send(stack.job(body=POISON), stack.record())
                release.set()
                with answer:
                    assert await answer.read() == b": queued\n\n"
                    with pytest.raises(UpstreamLost):
                        await answer.read()

            assert (await refused(stack, POISON)).error.status == 422

    run(test())
