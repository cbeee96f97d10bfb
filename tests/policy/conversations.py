"""Seeded conversations before a pool of engines that keep prefixes: what affinity finds in their caches, and how evenly
the load is spread. `python -m tests.policy.conversations` prints the table of docs/admission.md.

Chats share one of a few system prompts. Each turn is sent with all turns before it, holds its place while it is
answered, and is followed by the next after a pause. Every engine remembers the blocks of the prompts it was sent, least
used ones go first.
"""

import heapq
import random
from collections import OrderedDict
from dataclasses import dataclass, field

from router.policy.admission import Admission, AdmissionRules, PoolRules
from router.policy.affinity import prefix_of
from router.policy.decision import Admitted, Offer
from router.policy.demand import Demand, RequestClass
from router.policy.ledger import ClassLimits, EngineLimits

CHAT = RequestClass.CHAT
BYTES_PER_TOKEN = 4
CAPACITY_TOKENS = 200_000
SEATS = 256
#: A block of an engine's cache, in bytes, and how many an engine keeps.
BLOCK_BYTES = 64
BLOCKS = CAPACITY_TOKENS * BYTES_PER_TOKEN // BLOCK_BYTES


@dataclass
class Cache:
    """The prefix cache of one engine."""

    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def compute(self, prompt: bytes) -> int:
        """Take in `prompt`; how many bytes of it were there."""
        found, is_known, mark = 0, True, 0
        for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
            mark = hash((mark, prompt[start : start + BLOCK_BYTES]))
            is_known = is_known and mark in self.blocks
            found += BLOCK_BYTES if is_known else 0
            self.blocks[mark] = None
            self.blocks.move_to_end(mark)
        while len(self.blocks) > BLOCKS:
            self.blocks.popitem(last=False)
        return found


@dataclass(frozen=True)
class Load:
    """`chats_per_s` begin, each with one of `systems` system prompts of `system_bytes`."""

    chats_per_s: float
    systems: int = 4
    system_bytes: int = 4_000
    turns: int = 6
    engines: int = 4
    seconds: float = 200.0


@dataclass
class Found:
    """`cached_ratio` of all prompt bytes; `same_engine_ratio` of the later turns; `busiest_ratio`: the committed tokens
    of the busiest engine over the mean of all, weighed by load; `load_ratio`: that mean over the capacity."""

    cached_ratio: float
    same_engine_ratio: float
    busiest_ratio: float
    load_ratio: float
    refused: int


def play(load: Load, *, seed: int, with_affinity: bool) -> Found:
    """One run. The same seed means the same conversations."""
    rng = random.Random(seed)
    dice = random.Random(seed + 1)
    names = tuple(f"e{number}" for number in range(load.engines))
    limits = {name: EngineLimits(SEATS, {CHAT: ClassLimits(SEATS)}) for name in names}
    admission = Admission(AdmissionRules(PoolRules(names), None), limits, dict.fromkeys(names, CAPACITY_TOKENS))
    for name in names:
        admission.set_serving(name, True, 0.0)
    caches = {name: Cache() for name in names}
    systems = [rng.randbytes(load.system_bytes) for _ in range(load.systems)]
    events: list[tuple[float, int, str, bytes, int, str]] = []
    at_s, number = 0.0, 0
    while (at_s := at_s + rng.expovariate(load.chats_per_s)) < load.seconds:
        number += 1
        heapq.heappush(events, (at_s, number, "send", rng.choice(systems), 1, ""))
    sent = found = later = same = refused = 0
    busiest = committed_sum = load_sum = 0.0
    samples = 0
    while events:
        at_s, number, what, prompt, turn, engine = heapq.heappop(events)
        if what == "token":
            admission.first_token(f"{number}", at_s)
            continue
        if what == "done":
            admission.finish(f"{number}", at_s)
            if turn < load.turns:
                answered = prompt + rng.randbytes(rng.randint(200, 1_600))
                heapq.heappush(events, (at_s + rng.uniform(2, 30), number, "send", answered, turn + 1, engine))
            continue
        prompt += rng.randbytes(rng.randint(80, 800))
        tokens = len(prompt) // BYTES_PER_TOKEN
        offer = Offer(
            f"{number}",
            CHAT,
            Demand(tokens, tokens, rng.randint(50, 400)),
            sample=dice.random(),
            prefix=prefix_of(prompt) if with_affinity else None,
        )
        decision = admission.offer(offer, at_s)
        if not isinstance(decision, Admitted):
            refused += 1
            continue
        sent += len(prompt)
        found += caches[decision.engine].compute(prompt)
        if turn > 1:
            later += 1
            same += decision.engine == engine
        heapq.heappush(events, (at_s + 0.5, number, "token", b"", turn, ""))
        heapq.heappush(events, (at_s + rng.uniform(2, 8), number, "done", prompt, turn, decision.engine))
        held = [ledger.committed_tokens for ledger in admission.snapshot().engines.values()]
        busiest += max(held)
        committed_sum += sum(held) / len(held)
        load_sum += sum(held) / len(held) / CAPACITY_TOKENS
        samples += 1
    return Found(found / sent, same / max(1, later), busiest / committed_sum, load_sum / samples, refused)


def main() -> None:
    loads = {
        "idle": Load(chats_per_s=0.3),
        "half full": Load(chats_per_s=7.0),
        "nearly full": Load(chats_per_s=19.0),
        "one system prompt": Load(chats_per_s=7.0, systems=1),
        "short single turns": Load(chats_per_s=60.0, systems=1, turns=1, system_bytes=600),
    }
    print(
        f"{'load':20}{'committed':>10}  {'choice':12}{'cached':>8}{'same engine':>13}{'busiest/mean':>14}{'refused':>9}"
    )
    for name, load in loads.items():
        for with_affinity in (False, True):
            got = play(load, seed=1, with_affinity=with_affinity)
            choice = "affinity" if with_affinity else "two choices"
            print(
                f"{name:20}{got.load_ratio:10.0%}  {choice:12}{got.cached_ratio:8.0%}{got.same_engine_ratio:13.0%}"
                f"{got.busiest_ratio:14.2f}{got.refused:9}"
            )


if __name__ == "__main__":
    main()
