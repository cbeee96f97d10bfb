"""The way out: an ordered list of outside providers, tried when we have no place or no engine.

Only for causes that are ours, only for classes and models that the configuration allows, within the request's budget
of attempts, and never for a request that came round from another router.
"""

import logging
from collections.abc import Sequence

from router.clock import Clock
from router.flow.answer import Answer
from router.flow.failure import AttemptFailed
from router.flow.job import Job, Refusal
from router.flow.outgoing import to_relay
from router.flow.reading import ask
from router.flow.target import Target
from router.observe.metrics import Metrics
from router.policy.outcome import Outcome
from router.policy.retry import AttemptBudget, Failure
from router.request import RequestRecord
from router.upstream.relay import Relay

log = logging.getLogger(__name__)

#: Refusals that a relay may mend: ours, not the client's.
_RELAYABLE = frozenset(
    {
        Outcome.REFUSED_CHAT_FULL,
        Outcome.REFUSED_NO_ENGINE,
        Outcome.REFUSED_QUEUE_FULL,
        Outcome.REFUSED_QUEUE_DOWN,
        Outcome.REFUSED_QUEUE_WAIT,
    }
)


class Relays:
    """The relays of one model, in the order they are tried."""

    def __init__(
        self, model: str, relays: Sequence[Relay], clock: Clock, metrics: Metrics, *, commit_after_s: float
    ) -> None:
        self._model = model
        self._relays = tuple(relay for relay in relays if relay.model_for(model) is not None)
        self._clock = clock
        self._metrics = metrics
        self._targets = {
            relay.name: Target(f"Relay {relay.name}", relay, clock, commit_after_s, None, None)
            for relay in self._relays
        }

    @property
    def all(self) -> tuple[Relay, ...]:
        return self._relays

    async def send(self, job: Job, record: RequestRecord, budget: AttemptBudget, refusal: Refusal) -> Answer:
        """An answer from the first relay that gives one.

        Raises: `Refusal`: the one given, or that of the last relay where it says more (its own Retry-After).
        """
        if refusal.outcome not in _RELAYABLE or job.only is not None:
            raise refusal
        if not job.may_relay:
            if self._relays:
                self._metrics.loop_stops.inc()
                log.warning("a request came round through a relay that leads back here; it was not relayed again")
            raise refusal
        cause = refusal.outcome
        for relay in self._relays:
            if job.request_class not in relay.config.classes or not relay.can_try or budget.is_spent:
                continue
            try:
                answer = await self._try(relay, job, record, budget)
            except AttemptFailed as failed:
                if failed.failure.can_have_started:
                    # Nobody may be told to come again as if nothing had happened.
                    refusal = Refusal(failed.error, failed.outcome)
                elif failed.failure is Failure.BUSY:
                    # The provider's own Retry-After says more than ours.
                    refusal = Refusal(failed.error, cause)
                if not budget.may_try_again(failed.failure):
                    raise refusal from failed
            else:
                self._metrics.relayed.labels(self._model, relay.name, cause.value).inc()
                return answer
        raise refusal

    async def _try(self, relay: Relay, job: Job, record: RequestRecord, budget: AttemptBudget) -> Answer:
        """One request to one relay. Raises `AttemptFailed`."""
        budget.begin()
        record.attempts = budget.attempts
        record.engine, record.relay, record.pool = None, relay.name, "relay"
        record.note_sent(self._clock.now_s())
        result = "left"
        try:
            answer = await self._ask(relay, job, record)
            result = "answered"
        except AttemptFailed as failed:
            result = failed.failure.value
            record.relay, record.pool = None, "none"
            raise
        finally:
            self._metrics.attempted(self._model, relay.name, result)
        return answer

    async def _ask(self, relay: Relay, job: Job, record: RequestRecord) -> Answer:
        model = relay.model_for(self._model)
        assert model is not None, "a relay without the model is not among them"
        outgoing = to_relay(job.request, job.headers, model=model)
        return await ask(self._targets[relay.name], outgoing, job.request, record, relay.config.timeouts)
