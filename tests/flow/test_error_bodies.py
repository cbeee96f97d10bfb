"""An error's status is known before its body: a body that trickles or stalls holds nothing for long."""

import asyncio

import pytest

from router.flow import reading
from tests.flow.stack import fresh, run, sim
from tests.upstream.fakes import Connection, Script

SENTENCE = b'{"error":{"message":"Too many tokens.","type":"BadRequestError","code":400}}'


def slow(status: int, *, trickles: bool) -> Script:
    """Says `status`, promises a megabyte and gives one byte at a time for ever, or a sentence and nothing more."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 %d X\r\ncontent-length: 1000000\r\n\r\n" % status)
        if not trickles:
            await connection.send(SENTENCE)
            await connection.closed()
        try:
            while True:
                await connection.send(b"x")
                await asyncio.sleep(0.001)
        except ConnectionError:
            pass

    return script


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundredths of a second for an error's body. The test's guard is far above; the limit for silence is 10 s."""
    monkeypatch.setattr(reading, "_ERROR_S", 0.02)


@pytest.mark.parametrize("trickles", [True, False], ids=["trickles", "stalls"])
def test_a_busy_engine_whose_words_do_not_end_is_passed_over_for_another(trickles: bool) -> None:
    async def test() -> None:
        async with fresh(chat={"c": slow(503, trickles=trickles), "d": sim()}) as stack:
            for _ in range(4):
                answered, _ = await stack.send(stack.job())

                assert (answered.status, stack.records[-1].engine) == (200, "d")
            assert stack.attempts()["c", "busy"] >= 1

    run(test())


@pytest.mark.parametrize("trickles", [True, False], ids=["trickles", "stalls"])
def test_a_refusal_whose_words_do_not_end_is_passed_on_as_far_as_it_came(trickles: bool) -> None:
    async def test() -> None:
        async with fresh(chat={"c": slow(400, trickles=trickles)}) as stack:
            answered, got = await stack.send(stack.job())

            stack.check_ledger()
            assert answered.status == 400
            assert b'"error"' in got
            if not trickles:
                assert got == SENTENCE

    run(test())
