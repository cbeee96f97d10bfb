"""Prompts that engines died of are not sent on: the driver of `policy/quarantine.py` for one model.

It hashes prompts, tells the policy who was lost and which engine is gone, and says what a client gets whose prompt is
in quarantine. While no engine was lost lately it costs one look.
"""

import hashlib
import logging
import secrets
from collections.abc import Mapping, Sized

from router.clock import Clock
from router.errors import ApiError
from router.flow.job import Job, Refusal
from router.policy.lifecycle import EngineState
from router.policy.outcome import Outcome
from router.policy.quarantine import Quarantine
from router.upstream.engine import Engine

log = logging.getLogger(__name__)


class Suspects:
    """One per model. Watches its engines."""

    def __init__(self, engines: Mapping[str, Engine], clock: Clock) -> None:
        self._engines = engines
        self._clock = clock
        self._quarantine = Quarantine()
        #: Hashes are of no use to anybody else, and two prompts cannot be made to share one.
        self._key = secrets.token_bytes(32)
        #: While it is empty, there is nothing to check and nothing to clear.
        self.deaths: Sized = self._quarantine.deaths
        for engine in engines.values():
            engine.watch(self._on_change)

    def check(self, job: Job) -> None:
        """Raises: `Refusal` where the prompt of `job` is in quarantine."""
        if not self.deaths:
            return
        now_s = self._clock.now_s()
        token_at_s = {
            name: at_s for name, engine in self._engines.items() if (at_s := engine.life.last_ok_at_s) is not None
        }
        until_s = self._quarantine.until_s(self._hash(job), now_s, token_at_s)
        if until_s is not None:
            log.warning("request %s was refused: engines died of its prompt twice", job.request.request_id)
            raise _refusal(until_s - now_s)

    def lost(self, job: Job, engine: Engine) -> None:
        """The connection to `engine` broke before the first token of `job`. One that drains was going anyway."""
        if engine.status.state is not EngineState.DRAINING:
            self._quarantine.lost(self._hash(job), engine.name, self._clock.now_s())
            self._on_change(engine)

    def answered(self, job: Job) -> None:
        """The first token of `job` is here."""
        if self.deaths:
            self._quarantine.cleared(self._hash(job))

    def _on_change(self, engine: Engine) -> None:
        if self.deaths and engine.status.is_gone:
            self._quarantine.died(engine.name, self._clock.now_s())

    def _hash(self, job: Job) -> bytes:
        return hashlib.blake2b(job.request.body, key=self._key, digest_size=16).digest()


def _refusal(wait_s: float) -> Refusal:
    """422: the request is well-formed, it is this prompt that cannot be processed. A 5xx or 429 would have every SDK
    send it again."""
    error = ApiError(
        422,
        "prompt_quarantined",
        "Engines were lost twice while they worked on exactly this request, so it is not sent to another for the next "
        f"{wait_s:.0f} s. Change the prompt, or send it again after that.",
    )
    return Refusal(error, Outcome.REFUSED_QUARANTINED)
