"""The validated configuration: frozen values that the rest of the router is built from.

Nothing here parses or checks; `config/schema.py` says what a file may hold, `config/load.py` turns a file into these.
Names are the same here, in YAML and in the docs. Every default carries its reason in the schema.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from router.policy.demand import RequestClass


class Secret:
    """A string that never shows: not in `repr`, `str`, logs or comparisons by accident. `reveal()` is explicit."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where the router listens and what it bounds."""

    host: str
    port: int
    data_dir: Path
    workers: int
    body_max_bytes: int
    buffered_max_bytes: int
    connections_max: int
    shutdown_grace_s: float
    log_level: Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """The store behind the batch queue. `url` is `embedded`, or a redis://, rediss://, sentinel or cluster URL."""

    url: Secret
    key_prefix: str
    socket_timeout_s: float

    @property
    def is_embedded(self) -> bool:
        return self.url.reveal() == "embedded"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One vLLM server. `capacity_tokens` is used only where the engine does not say its own."""

    name: str
    url: str
    api_key: Secret | None
    capacity_tokens: int | None
    max_num_seqs: int | None


@dataclass(frozen=True, slots=True)
class TimeoutConfig:
    """How long an engine or relay may take. First byte covers the whole prefill and the engine's own queue."""

    connect_s: float
    first_byte_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """A set of engines used with one shape. `max_num_seqs`, `prefill_lanes` and `kv_share_ratio` are per engine."""

    request_class: RequestClass
    engines: tuple[str, ...]
    max_model_len: int
    max_num_seqs: int
    kv_share_ratio: float
    prefill_lanes: int | None
    timeouts: TimeoutConfig
    default_output_tokens: int
    #: chat only: the wait for a free place before borrow, relay or refusal is `ttft_target_s * hold_ratio`.
    ttft_target_s: float
    hold_ratio: float
    hold_max_requests: int
    #: batch only: the queue's bounds.
    queue_max_requests: int
    queue_max_tokens: int
    queue_wait_max_s: float

    @property
    def name(self) -> str:
        """`chat` or `batch`: a model has at most one pool of each class."""
        return self.request_class.value


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """How prompts of a model are counted.

    kind `huggingface`: `path` is a local folder or file. `tiktoken`: `encoding` is a name, `path` the folder of its
    local cache. `estimate`: bytes only. `exact`: `auto` counts exactly where class, fit or budget hang on it, `always`
    counts every prompt exactly. `image_tokens` is charged for each image.
    """

    kind: Literal["huggingface", "tiktoken", "estimate"]
    path: Path | None
    encoding: str | None
    exact: Literal["auto", "always"]
    image_tokens: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model as clients know it. `served_model_name` is the name its engines know."""

    name: str
    aliases: tuple[str, ...]
    served_model_name: str
    tokenizer: TokenizerConfig
    threshold_tokens: int
    chat: PoolConfig | None
    batch: PoolConfig | None
    chat_reserve_ratio: float
    borrow: bool
    cap_unset_max_tokens: bool
    retry_started: bool
    attempts_max: int
    commit_after_s: float
    affinity: bool = True

    @property
    def pools(self) -> tuple[PoolConfig, ...]:
        return tuple(pool for pool in (self.chat, self.batch) if pool is not None)

    def pool(self, request_class: RequestClass) -> PoolConfig | None:
        return self.chat if request_class is RequestClass.CHAT else self.batch


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """An outside provider. `models` maps our model name to the provider's; a model without an entry is not relayed."""

    name: str
    url: str
    api_key: Secret | None
    models: Mapping[str, str]
    classes: frozenset[RequestClass]
    timeouts: TimeoutConfig
    breaker_failures: int
    breaker_open_s: float
    proxy: Secret | None


@dataclass(frozen=True, slots=True)
class KeyConfig:
    """One client key, kept as a SHA-256 digest. `may_set` names what its requests may carry (see docs)."""

    name: str
    digest: bytes
    tenant: str
    weight: float
    default_class: RequestClass | None
    may_set: frozenset[Literal["class", "priority", "kv_transfer_params", "data_parallel_rank"]]
    admin: bool


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything. Model, alias, engine, relay and key names are unique; every reference resolves."""

    server: ServerConfig
    redis: RedisConfig
    engines: Mapping[str, EngineConfig]
    models: Mapping[str, ModelConfig]
    relays: tuple[RelayConfig, ...]
    keys: tuple[KeyConfig, ...]
    source: Path
