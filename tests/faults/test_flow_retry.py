"""What happens to a request whose engine fails it: sent again, sent elsewhere, or its error; never two at work."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from router.flow import attempt, line
from router.flow.job import Refusal
from router.policy.decision import Offer
from router.policy.demand import Demand, RequestClass
from router.policy.outcome import Outcome
from router.sim.faults import FaultKind, Faults
from router.upstream.api import UpstreamLost
from tests.flow.stack import (
    BATCH,
    CHAT,
    QUICK,
    body_of,
    fault,
    fresh,
    placed,
    run,
    sim,
    sim_relay,
    until,
)
from tests.queue.servers import free_port
from tests.upstream.fakes import STREAM_HEAD, Connection, Script, answer, piece

STREAM = body_of(max_tokens=4, stream=True)
PLAIN = body_of(max_tokens=4)
ONE_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'
both_bodies = pytest.mark.parametrize("body", [STREAM, PLAIN], ids=["stream", "plain"])


def playing(play: Callable[[Connection], Awaitable[None]], seen: list[bytes]) -> Script:
    """An engine that notes the body of each request and then does `play`."""

    async def script(connection: Connection) -> None:
        while (request := await connection.request()) is not None:
            seen.append(request.body)
            await play(connection)

    return script


async def drop(connection: Connection) -> None:
    connection.reset()


def says(body: bytes, *, status: int = 200, headers: str = "content-type: application/json\r\n") -> Any:
    async def play(connection: Connection) -> None:
        await connection.send(answer(body, status=status, headers=headers))

    return play


def streams(*events: bytes, reset: bool = False) -> Any:
    async def play(connection: Connection) -> None:
        await connection.send(STREAM_HEAD)
        for event in events:
            await connection.send(piece(event))
        if reset:
            await asyncio.sleep(0.01)
            connection.reset()
        else:
            await connection.send(piece(b""))

    return play


def nobody() -> str:
    """A URL where nothing listens."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that said 503 are left alone for milliseconds instead of about a second; the line looks as often."""
    monkeypatch.setattr(attempt, "_BUSY_PAUSE_S", 0.01)
    monkeypatch.setattr(attempt, "_BATCH_PAUSE_S", 0.01)
    monkeypatch.setattr(line, "_POLL_S", 0.02)


# -- what cannot have started -------------------------------------------------------------------------------------


@both_bodies
@pytest.mark.parametrize("request_class", [CHAT, BATCH])
def test_an_engine_that_refuses_the_connection_is_passed_over_for_another(
    body: dict[str, Any], request_class: RequestClass
) -> None:
    async def test() -> None:
        pool = {"dead": nobody(), "live": sim()}
        async with fresh(chat=pool, batch=pool, batch_settings={"prefill_lanes": None}) as stack:
            for _ in range(6):
                answered, got = await stack.send(stack.job(request_class, body=body))

                assert (answered.status, stack.records[-1].engine) == (200, "live")
                assert got
            assert stack.calls("live") == 6
            assert stack.attempts()["dead", "connect_failed"] >= 1
            assert max(record.attempts for record in stack.records) <= 2

    run(test())


@both_bodies
@pytest.mark.parametrize(
    "kind", [FaultKind.REJECT_503, FaultKind.STREAM_ERROR, FaultKind.ABORT], ids=["503", "503 as first event", "abort"]
)
def test_what_cannot_have_started_is_sent_again_without_the_client_seeing_it(
    kind: FaultKind, body: dict[str, Any]
) -> None:
    async def test() -> None:
        async with fresh(chat={"c": sim(fault(kind, requests=1)), "d": sim(fault(kind, requests=1))}) as stack:
            answered, got = await stack.send(stack.job(body=body))

            assert answered.outcome is Outcome.COMPLETED
            assert b'"error"' not in got
            assert stack.records[0].attempts in (2, 3)
            generated = sum(sim.engine.snapshot().finished.get("length", 0) for sim in stack.sims.values())
            assert generated == 1

    run(test())


def breaks_off(status: int, begun: bytes = b"") -> Any:
    """Its head names a longer body than comes."""

    async def play(connection: Connection) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n".encode()
        await connection.send(head + begun)
        # A clean close, so that what was sent arrives.
        connection.writer.close()

    return play


@both_bodies
@pytest.mark.parametrize("begun", [b"", b'{"error":{"mess'])
def test_a_503_whose_body_breaks_off_is_a_503_and_no_lost_request(body: dict[str, Any], begun: bytes) -> None:
    async def test() -> None:
        seen: list[bytes] = []
        engines = {"a": playing(breaks_off(503, begun), seen), "b": playing(breaks_off(503, begun), seen)}
        async with fresh(chat=engines, batch={}, attempts_max=2) as stack:
            with pytest.raises(Refusal) as found:
                await stack.send(stack.job(body=body))

            assert found.value.error.code == "engine_busy"
            assert len(seen) == 2
            assert [engine.life.losses for engine in stack.engines.values()] == [0, 0]

    run(test())


def test_a_400_whose_body_breaks_off_is_the_clients_mistake_and_takes_no_engine_out() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        async with fresh(chat={"a": playing(breaks_off(400, b"bad "), seen)}, batch={}) as stack:
            for _ in range(4):
                answered, body = await stack.send(stack.job(body=PLAIN))
                assert (answered.status, json.loads(body)["error"]["message"]) == (400, "bad")

            assert stack.engines["a"].status.can_serve

    run(test())


def test_a_503_as_the_only_event_of_a_stream_is_seen_though_its_blank_line_is_missing() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        pool = {"busy": playing(streams(b'data: {"error":{"message":"full","code":503}}'), seen), "free": sim()}
        async with fresh(chat=pool) as stack:
            for _ in range(4):
                answered, _ = await stack.send(stack.job(body=STREAM))
                assert answered.outcome is Outcome.COMPLETED

            assert len(seen) >= 1

    run(test())


@both_bodies
def test_chat_waits_out_a_busy_engine_within_its_hold(body: dict[str, Any]) -> None:
    async def test() -> None:
        busy_once = sim(fault(FaultKind.REJECT_503, requests=1))
        async with fresh(chat={"c": busy_once}, chat_settings={"hold_ratio": 1.0}, borrow=False) as stack:
            answered, _ = await stack.send(stack.job(body=body))

            assert (answered.status, stack.records[0].engine) == (200, "c")
            assert stack.records[0].hold_wait_s > 0
            assert stack.engines["c"].status.can_serve

    run(test())


def test_chat_that_a_busy_engine_will_not_take_in_time_borrows_then_relays_then_gets_429() -> None:
    busy = fault(FaultKind.REJECT_503)

    async def test() -> None:
        async with fresh(chat={"c": sim(busy)}, relay=sim_relay(), chat_settings={"hold_ratio": 0.0}) as stack:
            borrowed, _ = await stack.send(stack.job())
            await stack.sims["l"].set_faults(Faults((busy,)))
            relayed, _ = await stack.send(stack.job(), record := stack.record())

            assert (borrowed.status, stack.records[0].pool, stack.records[0].reason) == (200, "batch", "none,borrowed")
            assert (relayed.status, record.pool, record.relay) == (200, "relay", "x")
        async with fresh(chat={"c": sim(busy)}, batch={}, chat_settings={"hold_ratio": 0.0}) as stack:
            with pytest.raises(Refusal) as refused:
                await stack.send(stack.job())

            assert (refused.value.error.status, refused.value.outcome) == (429, Outcome.REFUSED_CHAT_FULL)
            assert 1 <= int(refused.value.error.response_headers()["retry-after"]) <= 60

    run(test())


def test_batch_that_a_busy_engine_sends_back_goes_to_its_old_place_in_the_line() -> None:
    async def test() -> None:
        async with fresh(batch={"l": sim(fault(FaultKind.REJECT_503, requests=5))}) as stack:
            order: list[str] = []

            async def client(name: str) -> None:
                await stack.send(stack.job(BATCH, body=body_of(name, max_tokens=2)))
                order.append(name)

            tasks: list[asyncio.Task[None]] = []
            for name in ("first", "second", "third"):
                tasks.append(asyncio.create_task(client(name)))
                await until(lambda: len(stack.line._waiters) + stack.calls("l") >= len(tasks))
            await asyncio.gather(*tasks)

            assert order == ["first", "second", "third"]
            assert stack.attempts()["l", "busy"] == 5
            assert stack.engines["l"].status.can_serve

    run(test())


def test_batch_whose_only_engine_refuses_connections_waits_until_it_is_back() -> None:
    async def test() -> None:
        async with fresh() as stack:
            await stack.sims["l"].set_faults(Faults((fault(FaultKind.REFUSE_CONNECTIONS),)))
            sending = asyncio.create_task(stack.send(stack.job(BATCH)))
            await until(lambda: ("l", "connect_failed") in stack.attempts())
            await stack.sims["l"].set_faults(Faults())

            answered, _ = await sending

            assert answered.status == 200
            assert stack.records[0].queue_wait_s > 0

    run(test())


def test_batch_that_no_engine_will_ever_take_ends_with_the_longest_wait() -> None:
    async def test() -> None:
        always_busy = {"l": sim(fault(FaultKind.REJECT_503))}
        async with fresh(batch=always_busy, batch_settings={"queue_wait_max_s": 0.3}) as stack:
            with pytest.raises(Refusal) as refused:
                await stack.send(stack.job(BATCH))

            assert refused.value.outcome is Outcome.REFUSED_QUEUE_WAIT
            assert refused.value.error.status == 503

    run(test())


def test_an_engine_that_refuses_the_routers_own_key_is_an_error_and_not_a_wait() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        denies = playing(says(b'{"error":"sk-secret is wrong"}', status=401), seen)
        async with fresh(chat={"c": denies}, batch={"l": denies}, borrow=False) as stack:
            for request_class in (CHAT, BATCH):
                with pytest.raises(Refusal) as refused:
                    await stack.send(stack.job(request_class))

                assert (refused.value.error.status, refused.value.outcome) == (502, Outcome.ENGINE_ERROR)
                assert "sk-secret" not in refused.value.error.message
            assert len(seen) == 2

    run(test())


# -- what may have started ----------------------------------------------------------------------------------------

LOST: dict[str, tuple[Any, int, Outcome]] = {
    "closed before the status": (drop, 502, Outcome.ENGINE_LOST),
    "closed after the headers": (streams(reset=True), 502, Outcome.ENGINE_LOST),
    "an empty stream": (streams(), 502, Outcome.ENGINE_LOST),
    "500": (says(b'{"error":{"message":"boom","code":500}}', status=500), 502, Outcome.ENGINE_ERROR),
    "500 as first event": (streams(b'data: {"error":{"message":"boom","code":500}}\n\n'), 502, Outcome.ENGINE_ERROR),
}


@pytest.mark.parametrize("request_class", [CHAT, BATCH])
@pytest.mark.parametrize("how", LOST)
def test_what_may_have_started_ends_in_its_error_and_reaches_one_engine(how: str, request_class: RequestClass) -> None:
    play, status, outcome = LOST[how]

    async def test() -> None:
        seen: list[bytes] = []
        pool = {"e1": playing(play, seen), "e2": playing(play, seen)}
        async with fresh(chat=pool, batch=pool, relay=sim_relay()) as stack:
            with pytest.raises(Refusal) as refused:
                await stack.send(stack.job(request_class, body=STREAM))

            assert (refused.value.error.status, refused.value.outcome) == (status, outcome)
            assert len(seen) == 1
            assert stack.calls("x") == 0
            assert stack.records[0].attempts == 1

    run(test())


@pytest.mark.parametrize("how", LOST)
def test_with_retry_started_what_may_have_started_is_sent_again_once(how: str) -> None:
    play, status, _ = LOST[how]

    async def test() -> None:
        seen: list[bytes] = []
        pool = {name: playing(play, seen) for name in ("e1", "e2", "e3")}
        async with fresh(chat=pool, batch={}, retry_started=True, attempts_max=5) as stack:
            with pytest.raises(Refusal) as refused:
                await stack.send(stack.job(body=STREAM))

            assert refused.value.error.status == status
            assert len(seen) == stack.records[0].attempts == 2

    run(test())


def test_with_retry_started_the_other_engine_answers() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        pool = {"bad": playing(drop, seen), "good": sim()}
        async with fresh(chat=pool, retry_started=True) as stack:
            for _ in range(8):
                answered, _ = await stack.send(stack.job(body=STREAM))
                assert answered.outcome is Outcome.COMPLETED

            assert len(seen) >= 1
            assert stack.calls("good") == 8

    run(test())


def test_what_may_have_started_is_told_so_where_the_other_engine_has_no_room() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        pool = {"bad": playing(drop, seen), "full": sim()}
        settings = {"hold_ratio": 0.0}
        async with fresh(
            chat=pool, batch={}, capacity_tokens=100, retry_started=True, chat_settings=settings, relay=sim_relay()
        ) as stack:
            blocker = stack.job(tokens=100)
            lease = await placed(stack.gate, Offer("blocker", CHAT, blocker.demand, only="full"))

            with pytest.raises(Refusal) as refused:
                await stack.send(stack.job())

            assert (refused.value.error.status, refused.value.outcome) == (502, Outcome.ENGINE_LOST)
            assert (len(seen), stack.calls("x")) == (1, 0)
            lease.release()

    run(test())


@pytest.mark.parametrize("body", [STREAM, PLAIN], ids=["stream", "plain"])
def test_silence_before_the_first_byte_ends_in_504_and_reaches_one_engine(body: dict[str, Any]) -> None:
    async def test() -> None:
        silent = sim(fault(FaultKind.SILENT))
        settings = {"timeouts": type(QUICK)(5.0, 0.1, 5.0)}
        async with fresh(chat={"c": silent, "d": silent}, chat_settings=settings, attempts_max=5) as stack:
            with pytest.raises(Refusal) as refused:
                await stack.send(stack.job(body=body, demand=Demand(4, 4, 0)))

            assert (refused.value.error.status, refused.value.outcome) == (504, Outcome.ENGINE_TIMEOUT)
            assert stack.calls("c") + stack.calls("d") == 1

    run(test())


@pytest.mark.parametrize("retry_started", [False, True])
def test_after_the_first_byte_nothing_is_ever_sent_again(retry_started: bool) -> None:
    async def test() -> None:
        seen: list[bytes] = []
        pool = {name: playing(streams(ONE_EVENT, reset=True), seen) for name in ("e1", "e2")}
        async with fresh(chat=pool, relay=sim_relay(), retry_started=retry_started) as stack:
            with pytest.raises(UpstreamLost):
                await stack.send(stack.job(body=STREAM))

            assert len(seen) == 1
            assert stack.calls("x") == 0

    run(test())


def test_all_tries_together_stay_within_the_budget() -> None:
    async def test() -> None:
        pool = {f"e{number}": nobody() for number in range(6)}
        relay = sim_relay(fault(FaultKind.REJECT_503))
        for attempts_max in (1, 2, 4):
            async with fresh(chat=pool, batch={}, relay=relay, attempts_max=attempts_max) as stack:
                with pytest.raises(Refusal) as refused:
                    await stack.send(stack.job())

                assert refused.value.error.status == 503
                assert sum(stack.attempts().values()) == stack.records[0].attempts == attempts_max

    run(test())


# -- the client's own mistakes ------------------------------------------------------------------------------------

TOO_LONG = (
    b'{"error":{"message":"maximum context length is 8192 tokens","type":"BadRequestError","param":null,"code":400}}'
)


@pytest.mark.parametrize("request_class", [CHAT, BATCH])
@pytest.mark.parametrize("how", ["400", "400 as first event"])
def test_a_length_error_of_the_engine_reaches_the_client_with_its_numbers_and_nobody_is_blamed(
    how: str, request_class: RequestClass
) -> None:
    play = says(TOO_LONG, status=400) if how == "400" else streams(b"data: " + TOO_LONG + b"\n\n", b"data: [DONE]\n\n")

    async def test() -> None:
        seen: list[bytes] = []
        pool = {"e1": playing(play, seen), "e2": playing(play, seen)}
        async with fresh(chat=pool, batch=pool, relay=sim_relay(), retry_started=True) as stack:
            answered, got = await stack.send(stack.job(request_class, body=STREAM))

            assert (answered.status, answered.outcome) == (400, Outcome.CLIENT_ERROR)
            assert json.loads(got)["error"]["message"] == "maximum context length is 8192 tokens"
            assert len(seen) == stack.records[0].attempts == 1
            assert stack.calls("x") == 0
            assert all(engine.status.can_serve for engine in stack.engines.values())
            assert {result for _, result in stack.attempts()} == {"answered"}

    run(test())


def test_an_engine_that_shuts_down_is_left_for_another_and_gets_nothing_more() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        text = b'{"error":{"message":"cannot schedule new futures after shutdown","code":500}}'
        pool = {"old": playing(says(text, status=500), seen), "new": sim()}
        async with fresh(chat=pool) as stack:
            for _ in range(8):
                answered, _ = await stack.send(stack.job())
                assert answered.status == 200

            assert len(seen) == 1
            assert not stack.engines["old"].status.can_serve

    run(test())
