"""Everything that shapes one simulated server, as one frozen value."""

import math
import random
from dataclasses import dataclass, field
from typing import Literal

from router.sim.engine import EngineShape
from router.sim.faults import Faults
from router.sim.presets import PRESETS, EnginePreset
from router.sim.text import ByteTokenizer, SimTokenizer


@dataclass(frozen=True, slots=True)
class OutputLengths:
    """How long answers are where the client sets no cap: log-normal, at least 1 token.

    `median_tokens` and `sigma` (of the logarithm) give the draw; it never exceeds `max_tokens`. With `under_caps` an
    answer may also stop before the client's cap; otherwise it always fills the cap, which keeps load predictable.
    """

    median_tokens: float = 120.0
    sigma: float = 0.7
    max_tokens: int = 4096
    under_caps: bool = False

    def draw(self, rng: random.Random) -> int:
        return max(1, min(self.max_tokens, round(math.exp(rng.gauss(math.log(self.median_tokens), self.sigma)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimServerOptions:
    """One server.

    `model` is the name it answers with, `aliases` are accepted too; `root` is the card's path. `version` decides
    between behaviours that changed: output over the context is clamped from 0.32, refused with 400 before. `time_scale`
    multiplies every step: 1 is real time, 0 is as fast as the machine goes. `port` 0 lets the kernel choose.

    `face` "vllm" is an engine; "provider" is an outside service: inference routes and `/v1/models` only, OpenAI's error
    codes. `api_key` is asked for on `/v1`. `rejected_fields` are top-level fields that get a 400.

    `sse_keep_alive_s` 0 is off. `tracks_load` makes `/load` count, as vLLM's flag does. `log_entries_max` and
    `log_body_max_bytes` bound what tests can look at. All draws come from `seed` and the order of requests.
    """

    model: str = "sim-model"
    aliases: tuple[str, ...] = ()
    root: str | None = None
    preset: EnginePreset = PRESETS["tiny-demo"]
    shape: EngineShape = field(default_factory=lambda: EngineShape(max_model_len=4096))
    version: str = "0.32.0"
    time_scale: float = 1.0
    host: str = "127.0.0.1"
    port: int = 0
    tokenizer: SimTokenizer = field(default_factory=ByteTokenizer)
    output_lengths: OutputLengths = field(default_factory=OutputLengths)
    faults: Faults = field(default_factory=Faults)
    face: Literal["vllm", "provider"] = "vllm"
    api_key: str | None = None
    rejected_fields: frozenset[str] = frozenset()
    serves_embeddings: bool = True
    embedding_dimensions: int = 8
    sse_keep_alive_s: float = 0.0
    tracks_load: bool = False
    seed: int = 0
    log_entries_max: int = 10_000
    log_body_max_bytes: int = 65_536

    def __post_init__(self) -> None:
        if self.time_scale < 0:
            raise ValueError(f"time_scale {self.time_scale} is negative")
        parse_version(self.version)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it answers to, its own first."""
        return (self.model, *self.aliases)

    def is_at_least(self, version: str) -> bool:
        """Whether it behaves as vLLM `version` or newer."""
        return parse_version(self.version) >= parse_version(version)


def parse_version(version: str) -> tuple[int, ...]:
    """`"0.32.0"` as `(0, 32, 0)`; what follows the third number is ignored.

    Raises: `ValueError` where the first three parts are no numbers.
    """
    parts = version.split("+", maxsplit=1)[0].split(".")[:3]
    if not parts or not all(part.isdigit() for part in parts):
        raise ValueError(f"version {version!r} is not like 0.32.0")
    return tuple(int(part) for part in parts)
