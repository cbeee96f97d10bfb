"""An `Admission` with its time, as the tests of admission use it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from router.policy.admission import Admission, AdmissionRules, PoolRules
from router.policy.decision import Admitted, Decision, Offer
from router.policy.demand import Demand, RequestClass
from router.policy.ledger import ClassLimits, EngineLimits

CHAT, BATCH = RequestClass.CHAT, RequestClass.BATCH
HOLD_S = 2.0


@dataclass
class House:
    """An `Admission` and the time. Engines `c*` are chat's, `b*` batch's; all of them serve unless told otherwise."""

    admission: Admission
    now_s: float = 100.0
    seen: list[Decision] = field(default_factory=list)

    def offer(self, name: str, request_class: RequestClass, tokens: int, **fields: object) -> Decision:
        """One request of one sequence and `tokens` in all."""
        offer = Offer(name, request_class, Demand(0, 0, tokens), **fields)  # type: ignore[arg-type]  # by its own names
        decision = self.admission.offer(offer, self.now_s)
        self.seen.append(decision)
        return decision

    def finish(self, *names: str) -> list[Decision]:
        return self.note(d for name in names for d in self.admission.finish(name, self.now_s))

    def expire(self, after_s: float) -> list[Decision]:
        self.now_s += after_s
        return self.note(self.admission.expire(self.now_s))

    def serving(self, name: str, serving: bool) -> list[Decision]:
        return self.note(self.admission.set_serving(name, serving, self.now_s))

    @property
    def held_tokens(self) -> int:
        return self.admission.snapshot().held_tokens

    @property
    def committed_tokens(self) -> int:
        return sum(ledger.committed_tokens for ledger in self.admission.snapshot().engines.values())

    def note(self, decisions: Iterable[Decision]) -> list[Decision]:
        found = list(decisions)
        self.seen.extend(found)
        return found


def house(
    *,
    chat: tuple[str, ...] = ("c1",),
    batch: tuple[str, ...] = ("b1",),
    capacity_tokens: int = 100,
    hold_s: float = HOLD_S,
    hold_max_requests: int = 3,
    borrow: bool = True,
    chat_reserve_ratio: float = 0.0,
    batch_limits: ClassLimits | None = None,
    max_num_seqs: int = 8,
) -> House:
    batch_limits = batch_limits or ClassLimits(8, prefill_lanes=1)
    limits = {name: EngineLimits(max_num_seqs, {CHAT: ClassLimits(8)}) for name in chat}
    for name in batch:
        limits[name] = EngineLimits(
            max_num_seqs, {CHAT: ClassLimits(7, 1.0 if name in chat else 0.5), BATCH: batch_limits}
        )
    rules = AdmissionRules(
        PoolRules(chat, hold_s, hold_max_requests) if chat else None,
        PoolRules(batch) if batch else None,
        borrow,
        chat_reserve_ratio,
    )
    built = House(Admission(rules, limits, dict.fromkeys(limits, capacity_tokens)))
    for name in limits:
        built.serving(name, True)
    return built


def admitted(*pairs: tuple[str, str], pool: RequestClass = CHAT, borrowed: bool = False) -> list[Decision]:
    return [Admitted(name, engine, pool, borrowed) for name, engine in pairs]
