"""The way out: when a request goes to a relay, what the relay is sent, and what is told when it fails too."""

import asyncio
import json
import logging
from typing import Any

import pytest

from router.flow.job import Refusal
from router.policy.decision import Offer
from router.policy.demand import RequestClass
from router.policy.outcome import Outcome
from router.sim.faults import FaultKind
from tests.flow.stack import BATCH, CHAT, MODEL, Stack, body_of, fault, fresh, placed, run, sim, sim_relay
from tests.upstream.fakes import Connection, Script, SeenRequest, answer, serve

STREAM = body_of(max_tokens=4, stream=True)
PLAIN = body_of(max_tokens=4)
OFF = {"hold_ratio": 0.0}


def without_engines(stack: Stack) -> None:
    for engine in stack.engines.values():
        engine.drain()


def seen_by(requests: list[SeenRequest], said: bytes, *, status: int = 200, headers: str = "") -> Script:
    def handler(request: SeenRequest) -> bytes:
        requests.append(request)
        return answer(said, status=status, headers=f"content-type: application/json\r\n{headers}")

    return serve(handler)


@pytest.mark.parametrize("body", [STREAM, PLAIN], ids=["stream", "plain"])
@pytest.mark.parametrize("request_class", [CHAT, BATCH])
def test_without_an_engine_the_relay_answers_under_its_own_model_name(
    request_class: RequestClass, body: dict[str, Any]
) -> None:
    async def test() -> None:
        async with fresh(relay=sim_relay()) as stack:
            without_engines(stack)

            answered, got = await stack.send(stack.job(request_class, body=body | {"priority": 3}))

            (entry,) = stack.sims["x"].log.entries()
            record = stack.records[0]
            assert (answered.status, answered.outcome) == (200, Outcome.COMPLETED)
            assert got
            sent = json.loads(entry.body)
            assert (sent["model"], "priority" in sent) == ("vendor/big-1", False)
            assert entry.headers["authorization"] == "Bearer relay-key"
            assert (record.relay, record.engine, record.pool) == ("x", None, "relay")
            assert stack.metrics.relayed.labels(MODEL, "x", "refused_no_engine")._value.get() == 1
            assert stack.attempts() == {("x", "answered"): 1}

    run(test())


def test_a_full_chat_pool_goes_to_the_relay_and_a_full_queue_too() -> None:
    async def test() -> None:
        settings = {"queue_max_requests": 1, "queue_max_tokens": 50}
        async with fresh(relay=sim_relay(), capacity_tokens=100, chat_settings=OFF, batch_settings=settings) as stack:
            leases = [
                await placed(stack.gate, Offer(f"full-{number}", CHAT, stack.job(tokens=100).demand))
                for number in range(2)
            ]

            answers = [await stack.send(stack.job(request_class)) for request_class in (CHAT, BATCH)]

            assert [answered.status for answered, _ in answers] == [200, 200]
            for cause in ("refused_chat_full", "refused_queue_full"):
                assert stack.metrics.relayed.labels(MODEL, "x", cause)._value.get() == 1
            for lease in leases:
                lease.release()

    run(test())


@pytest.mark.parametrize(
    "settings", [{"models": {"another": "vendor/big-1"}}, {"classes": frozenset({BATCH})}], ids=["model", "class"]
)
def test_a_relay_that_may_not_take_it_is_not_asked(settings: dict[str, Any]) -> None:
    async def test() -> None:
        async with fresh(relay=sim_relay(), relay_settings=settings) as stack:
            without_engines(stack)

            with pytest.raises(Refusal) as refused:
                await stack.send(stack.job())

            assert (refused.value.error.status, refused.value.outcome) == (503, Outcome.REFUSED_NO_ENGINE)
            assert stack.calls("x") == 0

    run(test())


def test_a_request_that_only_one_engine_can_answer_is_not_relayed() -> None:
    async def test() -> None:
        async with fresh(relay=sim_relay()) as stack:
            without_engines(stack)

            for request_class in (CHAT, BATCH):
                with pytest.raises(Refusal) as refused:
                    await stack.send(stack.job(request_class, only="c"))
                assert refused.value.error.status == 503

            assert stack.calls("x") == 0

    run(test())


def test_batch_for_an_engine_that_is_gone_is_refused_at_once_though_the_pool_is_busy() -> None:
    async def test() -> None:
        async with fresh(batch={"l1": sim(), "l2": sim()}) as stack:
            busy = stack.job(BATCH)
            lease = stack.gate.try_batch(Offer(busy.place_id, BATCH, busy.demand, only="l2"))
            assert lease is not None
            stack.engines["l1"].drain()

            with pytest.raises(Refusal) as refused:
                await stack.send(stack.job(BATCH, only="l1"))

            assert refused.value.outcome is Outcome.REFUSED_NO_ENGINE
            lease.release()

    run(test())


def test_a_long_conversation_that_a_chat_engine_keeps_goes_to_that_engine_and_not_into_the_line() -> None:
    async def test() -> None:
        async with fresh() as stack:
            answered, _ = await stack.send(stack.job(BATCH, only="c"))

            record = stack.records[0]
            assert (answered.status, record.engine, record.pool) == (200, "c", "chat")
            assert (record.request_class, record.reason) == (CHAT, "pinned_to_engine")

    run(test())


def test_a_request_that_came_round_is_not_relayed_again_and_the_loop_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with fresh(relay=sim_relay()) as stack:
            without_engines(stack)

            for _ in range(10):
                with pytest.raises(Refusal) as refused:
                    await stack.send(stack.job(may_relay=False))
                assert refused.value.error.status == 503

            assert stack.calls("x") == 0
            assert stack.metrics.loop_stops._value.get() == 10

    with caplog.at_level(logging.WARNING, logger="router.flow"):
        run(test())
    assert sum(len(record.getMessage()) for record in caplog.records) < 10 * 5_000


def test_the_relays_own_hint_to_come_back_reaches_the_client() -> None:
    async def test() -> None:
        async with fresh(relay=sim_relay(fault(FaultKind.REJECT_429, value=7))) as stack:
            without_engines(stack)

            with pytest.raises(Refusal) as refused:
                await stack.send(stack.job())

            assert refused.value.error.status == 429
            assert refused.value.error.response_headers()["retry-after"] == "7"

    run(test())


@pytest.mark.parametrize(("status", "told"), [(400, 400), (404, 404), (422, 422)])
def test_a_relays_refusal_of_the_request_itself_is_the_clients_answer(status: int, told: int) -> None:
    async def test() -> None:
        seen: list[SeenRequest] = []
        said = b'{"error":{"message":"no such thing","type":"invalid_request_error","param":null,"code":null}}'
        async with fresh(relay=seen_by(seen, said, status=status)) as stack:
            without_engines(stack)

            answered, got = await stack.send(stack.job())

            assert (answered.status, got, len(seen)) == (told, said, 1)
            assert answered.outcome is Outcome.CLIENT_ERROR
            assert stack.relays[0].can_try

    run(test())


@pytest.mark.parametrize("status", [401, 402, 403])
def test_a_relay_that_refuses_our_key_or_bill_leaves_the_client_with_our_own_refusal(status: int) -> None:
    async def test() -> None:
        seen: list[SeenRequest] = []
        async with fresh(relay=seen_by(seen, b'{"error":{"message":"bad relay-key"}}', status=status)) as stack:
            without_engines(stack)

            with pytest.raises(Refusal) as refused:
                await stack.send(stack.job())

            assert (refused.value.error.status, refused.value.error.code) == (503, "no_engine_available")
            assert "relay-key" not in str(refused.value)

    run(test())


def test_a_relay_that_may_have_started_is_not_asked_again_and_its_failure_is_told() -> None:
    async def test() -> None:
        async with fresh(relay=sim_relay(fault(FaultKind.DROP))) as stack:
            without_engines(stack)

            with pytest.raises(Refusal) as refused:
                await stack.send(stack.job())

            assert (refused.value.error.status, refused.value.outcome) == (502, Outcome.ENGINE_LOST)
            assert stack.calls("x") == 1

    run(test())


def test_a_relay_that_keeps_failing_is_left_alone() -> None:
    async def test() -> None:
        settings = {"breaker_failures": 2}
        async with fresh(relay=sim_relay(fault(FaultKind.ERROR_500)), relay_settings=settings) as stack:
            without_engines(stack)

            codes = []
            for _ in range(6):
                with pytest.raises(Refusal) as refused:
                    await stack.send(stack.job())
                codes.append(refused.value.error.code)

            assert stack.calls("x") == 2
            assert codes == ["engine_error"] * 2 + ["no_engine_available"] * 4

    run(test())


def test_clients_that_leave_amid_a_relayed_answer_give_its_sockets_back() -> None:
    async def stall(connection: Connection) -> None:
        await connection.request()
        await connection.closed()

    async def test() -> None:
        async with fresh(relay=stall) as stack:
            without_engines(stack)
            tasks = [asyncio.create_task(stack.send(stack.job(body=STREAM))) for _ in range(5)]
            while stack.busy_sockets < 5:
                await asyncio.sleep(0)

            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

            assert all(task.cancelled() for task in tasks)
            assert stack.relays[0].can_try

    run(test())
