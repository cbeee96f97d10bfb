"""From a classified request to an answer: a place, an engine, and what follows when that fails.

    place -> try an engine -> answer
               | failed, may be sent again       -> place, without that engine
               | failed, may have started        -> its error
    no place, or nothing left to try             -> a relay that is allowed, else the refusal

One `AttemptBudget` covers engines and relays (`policy/retry.py`). Every lease and response has one owner at a time:
this module until it hands out an `Answer`, then the answer.
"""

from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace

from router.clock import Clock
from router.config.model import ModelConfig, TimeoutConfig
from router.flow.answer import Answer
from router.flow.failure import AttemptFailed, tell
from router.flow.gate import Gate, NoPlace, PlaceRequest
from router.flow.job import Job, Refusal
from router.flow.lease import Lease
from router.flow.line import BatchLine, QueueClosed, QueueFull, QueueWaitOver
from router.flow.outgoing import to_engine
from router.flow.reading import ask
from router.flow.refusal import no_place, not_queued
from router.flow.relaying import Relays
from router.flow.suspects import Suspects
from router.observe.metrics import Metrics
from router.policy.affinity import AffinityResult, Prefix, prefix_of
from router.policy.classify import Reason
from router.policy.decision import RefusalCause
from router.policy.demand import RequestClass
from router.policy.lanes import prefill_s
from router.policy.outcome import Outcome
from router.policy.retry import AttemptBudget, Failure, RetryRules
from router.queue.store import QueueDown, Ticket
from router.request import RequestRecord
from router.upstream.engine import Engine

#: An engine that said 503 is left alone for this long: shorter than the default hold of chat (0.25 s), so that one that
#: has nowhere else to go is sent to it once more before it is refused.
_BUSY_PAUSE_S = 0.2
#: The same for batch, after anything that cannot have started: it waits in line meanwhile.
_BATCH_PAUSE_S = 1.0
#: A plain answer's first byte comes with its last token: so many seconds more for each token it may have.
_S_PER_OUTPUT_TOKEN = 0.25


class ModelFlow:
    """Everything one model needs to answer requests. Made once by the composition root."""

    def __init__(
        self,
        config: ModelConfig,
        gate: Gate,
        line: BatchLine | None,
        engines: Mapping[str, Engine],
        relays: Relays,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.config = config
        self.gate = gate
        self.line = line
        self.engines = engines
        self.relays = relays
        self._clock = clock
        self._metrics = metrics
        self._suspects = Suspects(engines, clock)
        self._rules = RetryRules(config.attempts_max, config.retry_started)
        chat = config.chat
        #: Where a prompt's prefix can choose: pools of several engines.
        self._follows = {
            request_class: config.affinity
            and (pool := config.pool(request_class)) is not None
            and len(pool.engines) > 1
            for request_class in RequestClass
        }
        self._affinity = {result: metrics.affinity.cells(config.name, result.value) for result in AffinityResult}
        self._hold_s = chat.ttft_target_s * chat.hold_ratio if chat is not None else 0.0

    async def send(self, job: Job, record: RequestRecord) -> Answer:
        """An answer whose status is known and of which the client has seen nothing yet; the caller closes it.

        Raises: `Refusal`. Cancelled, everything taken is given back.
        """
        self._suspects.check(job)
        job = self._with_pool_of_its_engine(job, record)
        budget = AttemptBudget(self._rules)
        excluded: frozenset[str] = frozenset()
        hold_until_s: float | None = None
        ticket: Ticket | None = None
        last: AttemptFailed | None = None
        prefix: Prefix | None = None
        if self._follows[job.request_class] and job.only is None and job.request.endpoint.generates:
            prefix = prefix_of(job.request.prefix_bytes())
        while True:
            place = PlaceRequest(job.place_id, job.request_class, job.demand, excluded, job.only, hold_until_s, prefix)
            try:
                if job.request_class is RequestClass.CHAT:
                    lease = await self._place_chat(place, record)
                else:
                    lease, ticket = await self._place_batch(place, ticket, record)
                    self._check_again(job, lease)
            except Refusal as refusal:
                if last is not None and (refusal.outcome is Outcome.REFUSED_NO_ENGINE or last.failure.can_have_started):
                    refusal = Refusal(last.error, last.outcome)
                return await self.relays.send(job, record, budget, refusal)
            self._note_place(lease, record)
            budget.begin()
            record.attempts = budget.attempts
            try:
                return await self._try_engine(job, lease, record)
            except AttemptFailed as failed:
                last = failed
                record.sent_at_s = None
                hold_until_s = record.arrived_at_s + self._hold_s
                if job.request_class is RequestClass.BATCH and failed.failure.passes:
                    # It costs batch time, which it has, not attempts; the queue's longest wait bounds it.
                    self.gate.pause(lease.engine, _BATCH_PAUSE_S)
                    budget.forgive()
                elif failed.failure is Failure.BUSY:
                    self.gate.pause(lease.engine, _BUSY_PAUSE_S)
                else:
                    excluded |= {lease.engine}
                if not budget.may_try_again(failed.failure):
                    raise Refusal(failed.error, failed.outcome) from failed

    async def send_light(self, job: Job, record: RequestRecord) -> Answer:
        """A call that touches only an engine's tokenizer: no place, no lease. The batch pool's engines come first:
        chat does not wait for their tokenizer threads.

        Raises: `Refusal`.
        """
        refusal = no_place(NoPlace(RefusalCause.NO_ENGINE, 10.0), self.config.name, RequestClass.CHAT)
        names = dict.fromkeys(name for pool in reversed(self.config.pools) for name in pool.engines)
        for name in names:
            engine = self.engines[name]
            if not engine.status.can_serve or job.only not in (None, name):
                continue
            record.engine = name
            record.attempts += 1
            record.note_sent(self._clock.now_s())
            try:
                return await self._ask(job, engine, self.config.pools[0].timeouts, None, record)
            except AttemptFailed as failed:
                tell(engine, failed)
                refusal = Refusal(failed.error, failed.outcome)
                if failed.failure.can_have_started or record.attempts >= self.config.attempts_max:
                    break
        raise refusal

    # -- a place ------------------------------------------------------------------------------------------------

    def _with_pool_of_its_engine(self, job: Job, record: RequestRecord) -> Job:
        """A long request that only an engine of the chat pool can answer is chat: no place in line will ever be its."""
        if job.request_class is RequestClass.CHAT or job.only is None:
            return job
        if self.config.batch is not None and job.only in self.config.batch.engines:
            return job
        record.request_class, record.reason = RequestClass.CHAT, Reason.PINNED.value
        return replace(job, request_class=RequestClass.CHAT)

    async def _place_chat(self, place: PlaceRequest, record: RequestRecord) -> Lease:
        try:
            lease = self.gate.try_chat(place)
            if lease is not None:
                return lease
            held_at_s = self._clock.now_s()
            try:
                return await self.gate.hold(place)
            finally:
                record.hold_wait_s += self._clock.now_s() - held_at_s
        except NoPlace as none:
            raise no_place(none, self.config.name, place.request_class) from None

    async def _place_batch(
        self, place: PlaceRequest, ticket: Ticket | None, record: RequestRecord
    ) -> tuple[Lease, Ticket]:
        line = self.line
        assert line is not None, "a batch pool has a line"
        asked_at_s = self._clock.now_s()
        try:
            if ticket is None and not self.gate.may_ever_place(place):
                raise NoPlace(RefusalCause.NO_ENGINE, 10.0)
            retry_after_s = self.gate.retry_after_s(RequestClass.BATCH, place.demand.kv_tokens)
            turn = await line.wait(place, place=ticket, age_s=asked_at_s - record.arrived_at_s)
        except NoPlace as none:
            raise no_place(none, self.config.name, place.request_class) from None
        except (QueueFull, QueueDown, QueueClosed, QueueWaitOver) as error:
            if isinstance(error, QueueFull):
                self._metrics.queue_refusals.labels(self.config.name, error.refusal.value).inc()
            elif isinstance(error, QueueDown):
                self._metrics.queue_refusals.labels(self.config.name, "down").inc()
            raise not_queued(error, self.config, place.demand.kv_tokens, retry_after_s) from None
        finally:
            record.queue_wait_s += self._clock.now_s() - asked_at_s
        return turn.lease, turn.ticket

    def _check_again(self, job: Job, lease: Lease) -> None:
        """It may have waited for an hour. Raises: `Refusal`; the lease is then back."""
        try:
            self._suspects.check(job)
        except Refusal:
            lease.release()
            raise

    def _note_place(self, lease: Lease, record: RequestRecord) -> None:
        record.pool = lease.pool.value
        record.engine = lease.engine
        if lease.affinity is not None:
            self._affinity[lease.affinity][0] += 1
        if lease.borrowed and ",borrowed" not in record.reason:
            record.reason += ",borrowed"
            self._metrics.borrowed.labels(self.config.name).inc()

    # -- one attempt --------------------------------------------------------------------------------------------

    async def _try_engine(self, job: Job, lease: Lease, record: RequestRecord) -> Answer:
        """One request to one engine. Raises `AttemptFailed`; the lease is then back."""
        engine = self.engines[lease.engine]
        pool = self.config.chat if lease.pool is RequestClass.CHAT else self.config.batch
        assert pool is not None, "a lease is of a pool that exists"
        limits = pool.timeouts
        if not job.request.stream:
            limits = first_byte_limits(limits, job)
            if job.request_class is RequestClass.BATCH:
                metrics = engine.status.metrics
                pace = metrics.prefill_s_per_token if metrics is not None else None
                lease.expect_first_token(prefill_s(job.demand.prompt_tokens, pace))
        record.note_sent(self._clock.now_s())
        try:
            answer = await self._ask(job, engine, limits, lease, record)
        except BaseException as error:
            result = "left"
            if isinstance(error, AttemptFailed):
                result = error.failure.value
                if error.failure is Failure.LOST:
                    self._suspects.lost(job, engine)
                tell(engine, error)
            lease.release()
            self._metrics.attempted(self.config.name, engine.name, result)
            raise
        self._metrics.attempted(self.config.name, engine.name, "answered")
        if record.first_token_at_s is not None:
            self._suspects.answered(job)
        elif answer.outcome is Outcome.COMPLETED:
            answer.on_cut = partial(self._cut_before_token, job, engine, answer)
        return answer

    def _cut_before_token(self, job: Job, engine: Engine, answer: Answer) -> None:
        """The upstream failed amid an answer whose headers had to go out before the first token."""
        if answer.record.first_token_at_s is None and answer.outcome is Outcome.ENGINE_LOST_STREAMING:
            self._suspects.lost(job, engine)
        engine.note_request_lost()

    async def _ask(
        self, job: Job, engine: Engine, limits: TimeoutConfig, lease: Lease | None, record: RequestRecord
    ) -> Answer:
        return await ask(
            engine.upstream,
            to_engine(job.request, job.headers, served_model_name=self.config.served_model_name, edits=job.edits),
            job.request,
            record,
            self._clock,
            name=f"Engine {engine.name}",
            limits=limits,
            commit_after_s=self.config.commit_after_s,
            lease=lease,
            on_output=engine.note_request_ok,
            on_cut=engine.note_request_lost,
        )


def first_byte_limits(timeouts: TimeoutConfig, job: Job) -> TimeoutConfig:
    """The limits for this request: a plain answer has its first byte only after its last token."""
    if job.request.stream or not job.request.endpoint.generates:
        return timeouts
    extra_s = job.demand.output_tokens * _S_PER_OUTPUT_TOKEN
    return TimeoutConfig(timeouts.connect_s, timeouts.first_byte_s + extra_s, timeouts.idle_s)
