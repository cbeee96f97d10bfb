"""What a load is made of: which request comes when, how long its prompt is, how much it may answer.

Rules: pure and seeded (no clock, no I/O, no global random), so that one seed gives one load on every machine; arrivals
never depend on answers (open loop). It must never know where the load is sent or how it is measured.

A prompt of n tokens is n common English words. Each of them, with the space before it, is one token in the usual
byte-level BPE vocabularies; what the server's chat template adds comes on top, and the true figure is its `usage`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType

from router.policy.demand import RequestClass

#: Bound of one planned load; more than that is a soak, not a bench.
REQUESTS_MAX = 1_000_000
#: Shares of a mix may miss 1 by this much (`chat:0.333,batch:0.667`).
_MIX_TOLERANCE = 0.001
#: Seconds without limit, for loads that are bounded by count.
FOREVER_S = math.inf

#: Words, each one token with its leading space in the DeepSeek vocabulary.
_WORD_LIST = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all their there has when who will more no if out so said what up its about into than them "
    "can only other new some could time these two may then do first any my now such like our over man me even most "
    "made after also did many before must through back years where much your way well down should because each just "
    "those people how too little state good very make world still own see men work long here get both between life "
    "being under never day same another know while last might us great old year off come since go against came right "
    "used take three"
)
_WORDS = tuple(_WORD_LIST.split())


@dataclass(frozen=True, slots=True)
class LogNormalTokens:
    """Lengths whose logarithm is normal: most short, few long. `sigma` is of the natural logarithm; values outside
    [`min_tokens`, `max_tokens`] are moved to the nearer end."""

    median_tokens: int
    sigma: float
    min_tokens: int
    max_tokens: int

    def draw(self, rng: Random) -> int:
        """One length in tokens."""
        drawn = round(self.median_tokens * math.exp(rng.gauss(0.0, self.sigma)))
        return max(self.min_tokens, min(self.max_tokens, drawn))


@dataclass(frozen=True, slots=True)
class LogUniformTokens:
    """Lengths spread evenly over the orders of magnitude between two ends, both in tokens and both included."""

    min_tokens: int
    max_tokens: int

    def draw(self, rng: Random) -> int:
        """One length in tokens."""
        low, high = math.log(self.min_tokens), math.log(self.max_tokens)
        return max(self.min_tokens, min(self.max_tokens, round(math.exp(rng.uniform(low, high)))))


Lengths = LogNormalTokens | LogUniformTokens


@dataclass(frozen=True, slots=True)
class ClassShape:
    """How long the prompts and the answers (`max_tokens`) of one class are."""

    prompt: Lengths
    output: Lengths


#: Full size. Chat: a few hundred tokens with a tail, answers of a paragraph or two. Batch: documents of 6k to 30k
#: tokens, answers of a page. Source of the orders of magnitude: Azure's 2023 and 2024 LLM inference traces.
FULL_SHAPES: Mapping[RequestClass, ClassShape] = MappingProxyType(
    {
        RequestClass.CHAT: ClassShape(LogNormalTokens(350, 0.8, 16, 3_000), LogNormalTokens(180, 0.7, 8, 800)),
        RequestClass.BATCH: ClassShape(LogUniformTokens(6_000, 30_000), LogNormalTokens(300, 0.5, 32, 1_000)),
    }
)

#: The same two shapes for the demo's small engines: a run of 20 s on two cores shows every path.
TINY_SHAPES: Mapping[RequestClass, ClassShape] = MappingProxyType(
    {
        RequestClass.CHAT: ClassShape(LogNormalTokens(80, 0.6, 8, 400), LogNormalTokens(24, 0.5, 4, 64)),
        RequestClass.BATCH: ClassShape(LogUniformTokens(6_000, 20_000), LogNormalTokens(32, 0.5, 8, 96)),
    }
)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """A load, in numbers.

    `rate_per_s`: mean arrivals a second over all classes; infinity sends everything at once and needs `requests_max`.
    `cv`: coefficient of variation of the gaps between arrivals: 1 is Poisson, more is bursty, 0 is a metronome.
    `mix`: share of each class, adding up to 1. The load ends at `requests_max` arrivals or `duration_s` seconds,
    whichever comes first.
    """

    mix: Mapping[RequestClass, float]
    rate_per_s: float
    seed: int
    cv: float = 1.0
    duration_s: float = FOREVER_S
    requests_max: int = REQUESTS_MAX
    shapes: Mapping[RequestClass, ClassShape] = field(default_factory=lambda: FULL_SHAPES)

    def __post_init__(self) -> None:
        """Raises: `ValueError` for a load that has no end, no beginning or no sense."""
        if not self.rate_per_s > 0:
            raise ValueError(f"rate is {self.rate_per_s:g} requests/s; it must be above 0")
        if not 0 <= self.cv <= 100:
            raise ValueError(f"cv is {self.cv:g}; it must be between 0 (even) and 100")
        if not self.duration_s > 0:
            raise ValueError(f"duration is {self.duration_s:g} s; it must be above 0")
        if not 1 <= self.requests_max <= REQUESTS_MAX:
            raise ValueError(f"number of prompts is {self.requests_max}; it must be between 1 and {REQUESTS_MAX}")
        if math.isinf(self.rate_per_s) and self.requests_max == REQUESTS_MAX:
            raise ValueError("rate is inf (everything at once); say how many prompts")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the load. `intended_at_s` counts from the start of the run; `prompt_tokens` is what the text is
    made to be, before the server's chat template; `text_seed` makes the text."""

    index: int
    request_class: RequestClass
    intended_at_s: float
    prompt_tokens: int
    max_tokens: int
    text_seed: str


def parse_mix(text: str) -> dict[RequestClass, float]:
    """`chat:0.9,batch:0.1` as shares that add up to exactly 1. Classes with a share of 0 are left out.

    Raises: `ValueError` that says which part is wrong and what is right.
    """
    shares: dict[RequestClass, float] = {}
    known = {item.value: item for item in RequestClass}
    for part in text.split(","):
        name, colon, number = part.strip().partition(":")
        name = name.strip()
        if not colon:
            raise ValueError(f"mix part {part.strip()!r} is not CLASS:SHARE, for instance chat:0.9,batch:0.1")
        request_class = known.get(name)
        if request_class is None:
            raise ValueError(f"mix names class {name!r}; the classes are {', '.join(known)}")
        if request_class in shares:
            raise ValueError(f"mix names class {name!r} twice")
        try:
            share = float(number)
        except ValueError:
            raise ValueError(f"share of {name!r} is {number.strip()!r}, not a number") from None
        if not 0 <= share <= 1:
            raise ValueError(f"share of {name!r} is {share:g}; a share is between 0 and 1")
        shares[request_class] = share
    total = sum(shares.values())
    if abs(total - 1) > _MIX_TOLERANCE:
        raise ValueError(f"shares of the mix add up to {total:g}, not to 1")
    return {request_class: share / total for request_class, share in shares.items() if share > 0}


def plan(spec: LoadSpec) -> Iterator[PlannedRequest]:
    """The requests of a load in order of arrival, made as they are asked for.

    Times, classes and lengths come from separate streams of random numbers: another rate gives the same requests at
    other times, and another mix does not change the times.
    """
    arrivals = _stream(f"{spec.seed}:arrivals")
    classes = _stream(f"{spec.seed}:classes")
    lengths = {request_class: _stream(f"{spec.seed}:lengths:{request_class}") for request_class in RequestClass}
    names, shares = list(spec.mix), list(spec.mix.values())
    at_s = 0.0
    for index in range(spec.requests_max):
        if index:
            at_s += _gap_s(arrivals, spec)
        if at_s >= spec.duration_s:
            return
        request_class = classes.choices(names, shares)[0]
        shape = spec.shapes[request_class]
        yield PlannedRequest(
            index=index,
            request_class=request_class,
            intended_at_s=at_s,
            prompt_tokens=shape.prompt.draw(lengths[request_class]),
            max_tokens=shape.output.draw(lengths[request_class]),
            text_seed=f"{spec.seed}:text:{index}",
        )


def _stream(name: str) -> Random:
    """A stream of random numbers of its own, the same for the same name."""
    return Random(name)  # noqa: S311 - a load is repeatable, not secret


def _gap_s(rng: Random, spec: LoadSpec) -> float:
    """Seconds to the next arrival: gamma gaps, whose shape is 1/cv^2 (exponential where cv is 1)."""
    if math.isinf(spec.rate_per_s):
        return 0.0
    mean_s = 1.0 / spec.rate_per_s
    if spec.cv == 0:
        return mean_s
    variance = spec.cv * spec.cv
    return rng.gammavariate(1.0 / variance, mean_s * variance)


def prompt_text(planned: PlannedRequest) -> str:
    """The text of a request: `prompt_tokens` words, the same for the same request, and unlike every other from its
    first words on, so that a prefix cache cannot help."""
    rng = _stream(planned.text_seed)
    return " ".join(rng.choices(_WORDS, k=planned.prompt_tokens))
