"""When a request was sent: of the router's own time only what came before the first sending counts as its own."""

from router.clock import SystemClock
from router.request import RequestRecord
from tests.flow.stack import CHAT, fresh, run, sim_relay
from tests.upstream.fakes import Connection, Script, answer

WORK_S = 1_000.0


class Ahead(SystemClock):
    """Goes right, and is put ahead by hand."""

    ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


def busy_after_work(clock: Ahead) -> Script:
    """An engine that works for long and then says that it is busy."""

    async def script(connection: Connection) -> None:
        while await connection.request() is not None:
            clock.ahead_s += WORK_S
            await connection.send(answer(b"{}", status=503))

    return script


def test_waits_and_sendings_after_the_first_leave_the_overhead_as_it_was() -> None:
    record = RequestRecord("id", arrived_at_s=100.0)
    record.hold_wait_s = 2.0
    record.note_sent(102.5)

    record.queue_wait_s = 40.0
    record.note_sent(150.0)

    assert (record.overhead_s, record.sent_at_s) == (0.5, 150.0)


def test_what_an_engine_took_before_a_relay_answered_is_not_called_the_routers_time() -> None:
    clock = Ahead()

    async def test() -> None:
        async with fresh(chat={"c": busy_after_work(clock)}, relay=sim_relay(), clock=clock, borrow=False) as stack:
            answered, _ = await stack.send(stack.job(CHAT))

            (record,) = stack.records
            record.outcome = answered.outcome
            stack.metrics.finish(record)
            (series,) = stack.metrics.overhead.collect()
            (total_s,) = (sample.value for sample in series.samples if sample.name.endswith("_sum"))
            assert (record.relay, record.attempts) == ("x", 2)
            assert record.sent_at_s is not None
            assert record.sent_at_s - record.arrived_at_s >= WORK_S
            assert total_s < WORK_S

    run(test())
