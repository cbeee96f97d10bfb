"""From a classified request to an answer: a place, an engine, and what follows when that fails.

    place -> try an engine -> answer
               | failed, may be sent again       -> place, without that engine
               | failed, may have started        -> its error
    no place, or nothing left to try             -> a relay that is allowed, else the refusal

One `AttemptBudget` covers engines and relays (`policy/retry.py`). Every lease and response has one owner at a time:
this module until it hands out an `Answer`, then the answer.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Final

from msgspec.structs import replace

from router.clock import Clock
from router.config.model import ModelConfig, TimeoutConfig
from router.flow.answer import Answer
from router.flow.failure import AttemptFailed, tell
from router.flow.gate import Gate, NoPlace
from router.flow.job import Job, Refusal
from router.flow.lease import Lease
from router.flow.line import BatchLine, QueueClosed, QueueFull, QueueWaitOver
from router.flow.outgoing import to_engine
from router.flow.reading import ask
from router.flow.refusal import no_place, not_queued
from router.flow.relaying import Relays
from router.flow.suspects import Suspects
from router.flow.target import Target
from router.observe.metrics import Metrics
from router.observe.tallies import Cells
from router.policy.affinity import AffinityResult, Prefix, prefix_of
from router.policy.classify import Reason
from router.policy.decision import Offer, RefusalCause
from router.policy.demand import RequestClass
from router.policy.lanes import prefill_s
from router.policy.outcome import Outcome
from router.policy.places import NOBODY
from router.policy.retry import AttemptBudget, Failure, RetryRules
from router.queue.store import QueueDown, Ticket
from router.request import Endpoint, RequestRecord
from router.upstream.engine import Engine

#: An engine that said 503 is left alone for this long: shorter than the default hold of chat (0.25 s), so that one that
#: has nowhere else to go is sent to it once more before it is refused.
_BUSY_PAUSE_S = 0.2
#: The same for batch, after anything that cannot have started: it waits in line meanwhile.
_BATCH_PAUSE_S = 1.0
#: A plain answer's first byte comes with its last token: so many seconds more for each token it may have.
_S_PER_OUTPUT_TOKEN = 0.25
_CHAT: Final = RequestClass.CHAT
_BATCH: Final = RequestClass.BATCH
_GENERATING = frozenset(endpoint for endpoint in Endpoint if endpoint.generates)


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
        self._targets = {
            name: _EngineTarget(
                f"Engine {name}",
                engine.upstream,
                clock,
                config.commit_after_s,
                engine.note_request_ok,
                engine.note_request_lost,
                engine,
                metrics.attempts.cells(config.name, name, "answered"),
            )
            for name, engine in engines.items()
        }
        self._limits = {pool.request_class: _Limits(pool.timeouts) for pool in config.pools}
        self._affinity = {result: metrics.affinity.cells(config.name, result.value) for result in AffinityResult}
        self._hold_s = chat.ttft_target_s * chat.hold_ratio if chat is not None else 0.0

    async def send(self, job: Job, record: RequestRecord) -> Answer:
        """An answer whose status is known and of which the client has seen nothing yet; the caller closes it.

        Raises: `Refusal`. Cancelled, everything taken is given back.
        """
        if self._suspects.deaths:
            self._suspects.check(job)
        request = job.request
        prefix: Prefix | None = None
        if job.only is not None:
            job = self._with_pool_of_its_engine(job, record)
        elif self.config.affinity and request.endpoint in _GENERATING and self.gate.has_choice[job.request_class]:
            prefix = prefix_of(request.prefix_bytes())
        is_chat = job.request_class is _CHAT
        budget = AttemptBudget(self._rules)
        excluded = NOBODY
        hold_until_s: float | None = None
        ticket: Ticket | None = None
        last: AttemptFailed | None = None
        while True:
            draw = self.gate.draw()
            offer = Offer(job.place_id, job.request_class, job.demand, draw, excluded, job.only, hold_until_s, prefix)
            try:
                if is_chat:
                    lease = self.gate.try_chat(offer) or await self._hold(offer, record)
                else:
                    lease, ticket = await self._place_batch(offer, ticket, record)
                    self._check_again(job, lease)
            except (NoPlace, Refusal) as none:
                refusal = no_place(none, self.config.name, job.request_class) if isinstance(none, NoPlace) else none
                if last is not None and (refusal.outcome is Outcome.REFUSED_NO_ENGINE or last.failure.can_have_started):
                    refusal = Refusal(last.error, last.outcome)
                return await self.relays.send(job, record, budget, refusal)
            try:
                place = lease.place
                target, pool = self._targets[place.engine], self._limits[place.pool]
                budget.attempts += 1
                record.attempts = budget.attempts
                record.engine, record.pool = place.engine, place.pool
                if place.affinity is not None:
                    self._affinity[place.affinity][0] += 1
                if place.borrowed:
                    self._note_borrowed(record)
                limits = pool.timeouts
                if not request.stream:
                    if request.endpoint in _GENERATING:
                        limits = pool.of_plain_answer(job.demand.output_tokens)
                    if not is_chat:
                        lease.expect_first_token(_prefill_s(job, target.engine))
                record.note_sent(self._clock.now_s())
                outgoing = to_engine(request, job.headers, self.config.served_model_name, job.edits)
                answer = await ask(target, outgoing, request, record, limits, lease)
            except AttemptFailed as failed:
                last = failed
                hold_until_s = record.arrived_at_s + self._hold_s
                excluded |= self._after_failure(job, lease, record, budget, failed)
            except BaseException as error:
                self._give_up(job, lease, error)
                raise
            else:
                target.answered[0] += 1
                if record.first_token_at_s is None:
                    self._watch_for_token(job, lease, answer)
                elif self._suspects.deaths:
                    self._suspects.answered(job)
                return answer

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
                outgoing = to_engine(job.request, job.headers, self.config.served_model_name, job.edits)
                return await ask(self._targets[name], outgoing, job.request, record, self.config.pools[0].timeouts)
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

    async def _hold(self, offer: Offer, record: RequestRecord) -> Lease:
        """The place that chat gets which found none at once. Raises: `NoPlace`."""
        held_at_s = self._clock.now_s()
        try:
            return await self.gate.hold(offer)
        finally:
            record.hold_wait_s += self._clock.now_s() - held_at_s

    async def _place_batch(self, offer: Offer, ticket: Ticket | None, record: RequestRecord) -> tuple[Lease, Ticket]:
        line = self.line
        assert line is not None, "a batch pool has a line"
        asked_at_s = self._clock.now_s()
        try:
            if ticket is None and not self.gate.may_ever_place(offer):
                raise NoPlace(RefusalCause.NO_ENGINE, 10.0)
            retry_after_s = self.gate.retry_after_s(RequestClass.BATCH, offer.demand.kv_tokens)
            turn = await line.wait(offer, place=ticket, age_s=asked_at_s - record.arrived_at_s)
        except (QueueFull, QueueDown, QueueClosed, QueueWaitOver) as error:
            if isinstance(error, QueueFull):
                self._metrics.queue_refusals.labels(self.config.name, error.refusal.value).inc()
            elif isinstance(error, QueueDown):
                self._metrics.queue_refusals.labels(self.config.name, "down").inc()
            raise not_queued(error, self.config, offer.demand.kv_tokens, retry_after_s) from None
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

    # -- one attempt --------------------------------------------------------------------------------------------

    def _after_failure(
        self, job: Job, lease: Lease, record: RequestRecord, budget: AttemptBudget, failed: AttemptFailed
    ) -> frozenset[str]:
        """Which engines the next attempt has to leave out besides. Raises: `Refusal` where there may be none."""
        self._give_up(job, lease, failed)
        record.sent_at_s = None
        engine, left_out = lease.place.engine, NOBODY
        if job.request_class is _BATCH and failed.failure.passes:
            # It costs batch time, which it has, not attempts; the queue's longest wait bounds it.
            self.gate.pause(engine, _BATCH_PAUSE_S)
            budget.forgive()
        elif failed.failure is Failure.BUSY:
            self.gate.pause(engine, _BUSY_PAUSE_S)
        else:
            left_out = frozenset({engine})
        if not budget.may_try_again(failed.failure):
            raise Refusal(failed.error, failed.outcome) from failed
        return left_out

    def _note_borrowed(self, record: RequestRecord) -> None:
        if ",borrowed" not in record.reason:
            record.reason += ",borrowed"
            self._metrics.borrowed.labels(self.config.name).inc()

    def _give_up(self, job: Job, lease: Lease, error: BaseException) -> None:
        """An attempt ended without an answer: failed, or its client left. The lease goes back."""
        engine, result = self.engines[lease.place.engine], "left"
        if isinstance(error, AttemptFailed):
            result = error.failure.value
            if error.failure is Failure.LOST:
                self._suspects.lost(job, engine)
            tell(engine, error)
        lease.release()
        self._metrics.attempted(self.config.name, engine.name, result)

    def _watch_for_token(self, job: Job, lease: Lease, answer: Answer) -> None:
        """The headers of `answer` have to go out before its first token."""
        if answer.outcome is Outcome.COMPLETED:
            engine = self.engines[lease.place.engine]
            answer.target = replace(answer.target, on_output=partial(self._late_token, job, engine))
            answer.on_cut = partial(self._cut_before_token, job, engine, answer)

    def _late_token(self, job: Job, engine: Engine) -> None:
        """The first token came after the headers had to go out."""
        engine.note_request_ok()
        self._suspects.answered(job)

    def _cut_before_token(self, job: Job, engine: Engine, answer: Answer) -> None:
        """The upstream failed amid an answer whose headers had to go out before the first token."""
        if answer.record.first_token_at_s is None and answer.outcome is Outcome.ENGINE_LOST_STREAMING:
            self._suspects.lost(job, engine)
        engine.note_request_lost()


class _EngineTarget(Target, frozen=True):
    """`answered` counts its answers."""

    engine: Engine
    answered: Cells


class _Limits:
    """How long an engine may take for a request of one pool."""

    __slots__ = ("of_plain_answer", "timeouts")

    def __init__(self, timeouts: TimeoutConfig) -> None:
        self.timeouts = timeouts

        # Kept, since most requests ask for one of few lengths.
        @lru_cache(maxsize=256)
        def of_plain_answer(output_tokens: int) -> TimeoutConfig:
            first_byte_s = timeouts.first_byte_s + output_tokens * _S_PER_OUTPUT_TOKEN
            return TimeoutConfig(timeouts.connect_s, first_byte_s, timeouts.idle_s)

        #: The limits of an answer that is not streamed: its first byte comes only after its last token.
        self.of_plain_answer = of_plain_answer


def _prefill_s(job: Job, engine: Engine) -> float:
    """How long the prefill of `job` probably takes."""
    metrics = engine.status.metrics
    return prefill_s(job.demand.prompt_tokens, metrics.prefill_s_per_token if metrics is not None else None)
