"""The engine's socket fails at its Nth operation, for N = 1, 2, 3 ... until a run passes untouched: whatever the
client is told, every token, socket and ticket is back, and the call has one ending."""

import itertools
import json
import re
from typing import Any

import pytest

from tests.cases.house import House, house_of
from tests.faults.faulty import EVENTS, STREAMED, Fault, FaultyEngine, check, run
from tests.http.scripted import COMPLETION, DONE
from tests.http.setting import MODEL, chat_body

CHAT = "/v1/chat/completions"
_numbers = itertools.count(1)


def call_of(kind: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a chat or a batch request, plain or a stream, like no other: a prompt that engines were lost on
    is remembered."""
    number = next(_numbers)
    stream = {"stream": True} if "stream" in kind else {}
    if "chat" in kind:
        return CHAT, chat_body(f"call {number}", max_tokens=2, **stream)
    return "/v1/completions", {"model": MODEL, "prompt": [number] * 1_500, "max_tokens": 2, **stream}


#: A stall ends at these limits.
TIMEOUTS = {"timeouts": {"first_byte_s": 0.25, "idle_s": 0.25}, "max_num_seqs": 4}
RUNS_MAX = 400
#: Batch prompts are thousands of bytes; they are read in larger pieces.
READ_BYTES = {"chat": 128, "batch": 1_024}


def is_whole(content: bytes) -> bool:
    return content in (COMPLETION, STREAMED)


def is_well_formed(status: int, content: bytes, *, is_stream: bool) -> bool:
    """An error answer, or a stream whose end is an error event; a plain answer that was cut has raised before."""
    if status != 200:
        return set(json.loads(content)["error"]) == {"message", "type", "param", "code"}
    if not is_stream:
        return is_whole(content)
    if content == STREAMED:
        return True
    *_, last, end, rest = re.split(rb"\r?\n\r?\n", content)
    return bool(json.loads(last.removeprefix(b"data: "))["error"]["code"]) and (end + b"\n\n", rest) == (DONE, b"")


async def walk(house: House, engines: list[FaultyEngine], fault: Fault, call: str) -> int:
    """A run for each operation; how many there were before one passed untouched."""
    # A stall costs its limit; every third one is enough.
    for at in range(1, RUNS_MAX, 3 if fault is Fault.STALL else 1):
        for engine in engines:
            engine.arm(fault, at)
        answered = await house.post(*call_of(call))
        has_failed = any(engine.has_failed for engine in engines)
        await check(house)
        assert is_well_formed(answered.status_code, answered.content, is_stream="stream" in call)
        if not has_failed:
            assert is_whole(answered.content)
            return at - 1
    raise AssertionError("no run passed untouched")


def pools_of(call: str, engines: list[FaultyEngine]) -> dict[str, Any]:
    named = dict(zip("cd", engines, strict=False))
    limits = {"chat_settings": TIMEOUTS, "batch_settings": TIMEOUTS | {"queue_wait_max_s": 5.0, "prefill_lanes": 2}}
    return limits | ({"chat": named, "batch": {}} if "chat" in call else {"chat": {}, "batch": named})


@pytest.mark.parametrize(
    ("call", "keeps"),
    [("chat", True), ("chat stream", True), ("chat stream", False), ("batch stream", True)],
    ids=["chat", "stream", "stream, a connection each", "batch stream"],
)
def test_one_engine_that_fails_at_any_operation_in_any_way_leaves_nothing_behind(call: str, keeps: bool) -> None:
    async def test() -> None:
        engine = FaultyEngine(keeps=keeps, read_bytes=READ_BYTES[call.split()[0]])
        async with house_of(**pools_of(call, [engine])) as house:
            operations = {fault: await walk(house, [engine], fault, call) for fault in Fault}

            # The engine had the request in several reads and gave its answer in several pieces.
            assert min(operations.values()) >= (14 if "stream" in call else 7)

    run(test)


@pytest.mark.parametrize("call", ["chat stream", "batch"])
def test_a_retry_over_two_engines_that_both_fail_leaves_nothing_behind(call: str) -> None:
    async def test() -> None:
        engines = [FaultyEngine(keeps=True, read_bytes=READ_BYTES[call.split()[0]]) for _ in range(2)]
        async with house_of(**pools_of(call, engines), model={"retry_started": True}) as house:
            operations = {fault: await walk(house, engines, fault, call) for fault in Fault}

            assert min(operations.values()) >= (14 if "stream" in call else 7)

    run(test)


@pytest.mark.parametrize("call", ["chat", "chat stream"])
def test_with_one_engine_well_a_retry_hides_every_failure_before_the_first_token(call: str) -> None:
    async def test() -> None:
        engines = [FaultyEngine(keeps=True), FaultyEngine(keeps=True)]
        async with house_of(**pools_of(call, engines), model={"retry_started": True}) as house:
            for at in range(1, RUNS_MAX):
                spent = Once(engines, at)
                answered = await house.post(*call_of(call))
                await check(house)
                if not spent.has_failed:
                    break
                assert answered.status_code == 200
                assert is_whole(answered.content) or answered.content.startswith(EVENTS[0])

    run(test)


class Once:
    """One fault for both engines: whichever is first at its Nth operation has it, and the other is well."""

    def __init__(self, engines: list[FaultyEngine], at: int) -> None:
        self._engines = engines
        for engine, other in zip(engines, reversed(engines), strict=True):
            engine.arm(Fault.RESET, at)
            engine.on_failure = other.disarm

    @property
    def has_failed(self) -> bool:
        return any(engine.has_failed for engine in self._engines)


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.CLOSE, Fault.STALL])
def test_an_engine_that_fails_while_a_large_body_is_sent_to_it_leaves_nothing_behind(fault: Fault) -> None:
    async def test() -> None:
        engine = FaultyEngine(keeps=True, read_bytes=256 * 1024)
        async with house_of(chat={"c": engine}, batch={}, chat_settings=TIMEOUTS) as house:
            for at in range(1, RUNS_MAX, 3 if fault is Fault.STALL else 1):
                engine.arm(fault, at)
                answered = await house.post(CHAT, {**call_of("chat")[1], "x": "y" * 3_000_000})
                has_failed = engine.has_failed
                await check(house)
                assert is_well_formed(answered.status_code, answered.content, is_stream=False)
                if not has_failed:
                    break
            assert answered.content == COMPLETION
            assert at > 8

    run(test)
