"""Which prompts are not sent any more, because engines die of them.

A prompt that kills its engine is sent again by its client, and again; without a memory it walks through the fleet. So
deaths are remembered, each with the prompts that were lost in it before their first token:

    lost      a connection broke before the prompt's first token: the engine may have died of it
    died      the engine was gone within `CONFIRM_S` of that: it did die; else the loss is forgotten
    cleared   the prompt got a token from an engine: it kills nobody

A prompt is in quarantine while it was in two deaths, at most `QUARANTINE_S` apart, of which at most `CROWD_MAX` prompts
were common, until `QUARANTINE_S` after the later one. While a death is not certain, it counts as one as long as no
token came out of the engine since, so that a prompt sent three times in a second does not reach a third engine.

Why not the first death: an engine that dies takes everybody's prompts with it, and one of them at most is at fault. Why
the crowd: when two engines die of something else (power, a driver, a bad release), the same clients come again and all
their prompts are in both deaths. Of those that live, the next engine's first tokens clear them, and what remains in
common shrinks to the one at fault. What this may get wrong: few requests under way and two engines dying by chance
within `QUARANTINE_S`; their prompts are then refused for that long.

Bounded: `DEATHS_MAX` deaths of `PROMPTS_MAX` prompts. It is given hashes of prompts and never knows what they say.
"""

from collections import deque
from collections.abc import Mapping
from itertools import combinations

import msgspec

QUARANTINE_S = 600.0
#: Longer than it takes to find that an engine refuses connections (under 5 s), with room for a slow death.
CONFIRM_S = 10.0
CROWD_MAX = 4
DEATHS_MAX = 64
PROMPTS_MAX = 256
_NEVER = float("-inf")


class _Death(msgspec.Struct):
    """`at_s`: of the first loss. `prompts`: at most `PROMPTS_MAX`; of a larger crowd the first ones."""

    engine: str
    at_s: float
    prompts: set[bytes]
    is_certain: bool = False


class Quarantine:
    """The memory of one model. Prompts are given as hashes. While `deaths` is empty, nothing needs to be hashed or
    asked."""

    __slots__ = ("deaths",)

    def __init__(self) -> None:
        self.deaths: deque[_Death] = deque(maxlen=DEATHS_MAX)

    def lost(self, prompt: bytes, engine: str, now_s: float) -> None:
        """The connection to `engine` broke before the first token of `prompt`."""
        death = self._latest(engine, now_s)
        if death is None:
            death = _Death(engine, now_s, set())
            self.deaths.append(death)
        if len(death.prompts) < PROMPTS_MAX:
            death.prompts.add(prompt)

    def died(self, engine: str, now_s: float) -> None:
        """`engine` refuses connections or fails its health. Idempotent."""
        death = self._latest(engine, now_s)
        if death is not None:
            death.is_certain = True

    def cleared(self, prompt: bytes) -> None:
        """An engine gave a token to `prompt`."""
        for death in self.deaths:
            death.prompts.discard(prompt)

    def until_s(self, prompt: bytes, now_s: float, token_at_s: Mapping[str, float]) -> float | None:
        """The end of the quarantine of `prompt`, None if it is in none. `token_at_s`: when each engine last gave a
        token, for those that did."""
        self._forget(now_s)
        deaths = [
            death
            for death in self.deaths
            if prompt in death.prompts and (death.is_certain or token_at_s.get(death.engine, _NEVER) <= death.at_s)
        ]
        until_s = now_s
        for earlier, later in combinations(deaths, 2):
            if later.at_s - earlier.at_s <= QUARANTINE_S and len(earlier.prompts & later.prompts) <= CROWD_MAX:
                is_certain = earlier.is_certain and later.is_certain
                until_s = max(until_s, later.at_s + (QUARANTINE_S if is_certain else CONFIRM_S))
        return until_s if until_s > now_s else None

    def _latest(self, engine: str, now_s: float) -> _Death | None:
        """The death of `engine` that is under way or has just been."""
        for death in reversed(self.deaths):
            if death.engine == engine and now_s - death.at_s <= CONFIRM_S:
                return death
        return None

    def _forget(self, now_s: float) -> None:
        kept = [death for death in self.deaths if death.prompts and now_s - death.at_s <= _kept_s(death)]
        if len(kept) < len(self.deaths):
            self.deaths.clear()
            self.deaths.extend(kept)


def _kept_s(death: _Death) -> float:
    """A certain one until its last possible partner's quarantine is over."""
    return 2 * QUARANTINE_S if death.is_certain else CONFIRM_S
