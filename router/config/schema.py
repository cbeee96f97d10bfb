"""What `pools.yaml` may hold: every setting with its type, range, default and meaning.

Rules of the file: it describes single values only; what depends on two of them is in `rules.py`. Beside every default
stands its precedent or measurement. Each setting has a heading in `docs/configuration.md`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from router.config.section import Section, finished_json_schema

#: Names of ours become metric labels, header values and parts of Redis keys.
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:@/+-]*$"
#: Model names are whatever the engine calls them (`/models/llama`, `org/name`); braces would break Redis hash tags.
_MODEL_NAME = r"^[^\s{}\x00-\x1f\x7f]+$"
#: What can stand in an `Authorization` header.
_HEADER_SAFE = r"^[!-~]+$"

_SECRET: dict[str, Any] = {"format": "password", "writeOnly": True}

Name = Annotated[str, Field(pattern=_NAME, max_length=64)]
ModelName = Annotated[str, Field(pattern=_MODEL_NAME, max_length=256)]
Class = Literal["chat", "batch"]
Grant = Literal["class", "priority", "kv_transfer_params", "data_parallel_rank"]


class Server(Section):
    """Where the router listens and what it bounds. Bounds hold for each worker process."""

    host: Annotated[str, Field(min_length=1, max_length=255, description="Address to listen on.")] = "127.0.0.1"
    # 8080 is the IANA's "http-alt"; vLLM itself takes 8000.
    port: Annotated[int, Field(ge=0, le=65535, description="TCP port to listen on; 0 takes a free one.")] = 8080
    data_dir: Annotated[
        str, Field(min_length=1, description="Folder for what must survive a restart; made if missing.")
    ] = "data"
    # One process does thousands of requests a CPU-second; engines are the limit long before it.
    workers: Annotated[int, Field(ge=1, le=64, description="Router processes; each holds its part of every pool.")] = 1
    # 30k tokens of text are 150 kB; the rest is room for images. vLLM's Rust front end stops there too, and decoding
    # the conversation of a larger one holds the event loop for more than 50 ms.
    body_max_bytes: Annotated[int, Field(ge=1024, le=2**31, description="Largest request body.")] = 32 * 1024 * 1024
    # Sixteen bodies of the largest size.
    buffered_max_bytes: Annotated[
        int,
        Field(
            ge=1024,
            le=2**40,
            description="Bytes of all bodies and unread answers held at one time; JSON takes three times that in work.",
        ),
    ] = 512 * 1024 * 1024
    # Every waiting batch caller keeps a socket: the default queue four times over.
    connections_max: Annotated[int, Field(ge=1, le=1_000_000, description="Client connections at one time.")] = 4096
    # Under the 30 s that Kubernetes gives a pod before it kills it.
    shutdown_grace_s: Annotated[
        float, Field(ge=0, le=86_400, description="How long running requests may take to finish at shutdown.")
    ] = 25.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="Lowest level that is logged.")
    ] = "info"


class Redis(Section):
    """The store behind the batch queue."""

    url: Annotated[
        str,
        Field(
            min_length=1,
            json_schema_extra=_SECRET,
            repr=False,
            description="`embedded`, or a redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL.",
        ),
    ] = "embedded"
    key_prefix: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$", max_length=64, description="What every key begins with.")
    ] = "router"
    # An fsync on a busy disk takes up to about 2 s, which is how long Redis itself postpones one before it blocks.
    socket_timeout_s: Annotated[
        float, Field(gt=0, le=60, description="Longest connect, and longest wait for one answer.")
    ] = 2.0


class Engine(Section):
    """One vLLM server."""

    name: Annotated[Name, Field(description="Name in pools, logs, metrics and the x-router-engine header.")]
    url: Annotated[str, Field(min_length=1, max_length=2048, description="Base URL, with or without /v1 at its end.")]
    api_key: Annotated[
        str | None,
        Field(pattern=_HEADER_SAFE, json_schema_extra=_SECRET, repr=False, description="The engine's own --api-key."),
    ] = None
    capacity_tokens: Annotated[
        int | None, Field(ge=1, le=2**48, description="KV tokens it holds; used only where it does not say so itself.")
    ] = None
    max_num_seqs: Annotated[
        int | None, Field(ge=1, le=65_536, description="Its --max-num-seqs, all pools together.")
    ] = None


class Timeouts(Section):
    """How long the other side may take. There is no limit on a whole request."""

    # httpx and Envoy give a connect 5 s too.
    connect_s: Annotated[float, Field(gt=0, le=300, description="For the connection, TLS included.")] = 5.0
    first_byte_s: Annotated[
        float, Field(gt=0, le=86_400, description="From the request to the first byte: queue and prefill.")
    ] = 120.0
    # A preempted sequence is computed anew before its next token; a 30k prefill takes 2 to 24 s on real cards.
    idle_s: Annotated[float, Field(gt=0, le=86_400, description="Between two bytes of an answer.")] = 120.0


class BatchTimeouts(Timeouts):
    """As for chat, but patient."""

    # Prompts of the full context behind one another; callers of batch wait for hours.
    first_byte_s: Annotated[
        float, Field(gt=0, le=86_400, description="From the request to the first byte: queue and prefill.")
    ] = 3600.0


class _Pool(Section):
    engines: Annotated[list[Name], Field(min_length=1, max_length=1024, description="Names of its engines.")]
    max_model_len: Annotated[
        int, Field(ge=1, le=2**31, description="Longest context in tokens, prompt and output together.")
    ]
    max_num_seqs: Annotated[
        int, Field(ge=1, le=65_536, description="Sequences at one time on each engine of the pool.")
    ]


class ChatPool(_Pool):
    """Interactive requests: short prompts, many at a time."""

    kv_share_ratio: Annotated[
        float, Field(gt=0, le=1, description="Part of each engine's KV tokens that this pool may commit.")
    ] = 1.0
    prefill_lanes: Annotated[
        int | None, Field(ge=1, le=65_536, description="Requests before their first token at one time on each engine.")
    ] = None
    # A second is where an interactive answer begins to feel late (Nielsen's limit for an unbroken flow of thought).
    ttft_target_s: Annotated[float, Field(gt=0, le=3600, description="Time to first token that chat is held to.")] = 1.0
    # A quarter of the target leaves three for prefill; waiting longer than this, a relay is the better answer.
    hold_ratio: Annotated[
        float, Field(ge=0, le=1, description="Part of ttft_target_s that a request may wait for a place.")
    ] = 0.25
    # Little's law: a hold of 0.25 s at 1,000 requests a second.
    hold_max_requests: Annotated[int, Field(ge=0, le=1_000_000, description="Requests that wait at one time.")] = 256
    # Public chat traces have a mean near 211 output tokens; twice that, until the router has measured its own.
    default_output_tokens: Annotated[
        int, Field(ge=1, le=2**31, description="Reserved for an answer without a cap until a q99 has been measured.")
    ] = 512
    timeouts: Annotated[Timeouts, Field(description="Limits of one call to an engine of this pool.")] = Timeouts()


class BatchPool(_Pool):
    """Patient requests: long prompts, few at a time."""

    # 0.6 of a shared engine is what SageServe gives non-interactive work; an engine of its own is batch's whole.
    kv_share_ratio: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="Part of each engine's KV tokens that this pool may commit. "
            "Without it: 0.6 where an engine is shared with chat, else 1.0.",
        ),
    ] = None
    # Two long prefills at a time end no sooner than one after the other, and chat waits behind both.
    prefill_lanes: Annotated[
        int, Field(ge=1, le=65_536, description="Requests before their first token at one time on each engine.")
    ] = 1
    queue_max_requests: Annotated[int, Field(ge=1, le=10_000_000, description="Requests that wait, in all.")] = 1000
    # 1,000 prompts of 30k: 40 minutes of prefill at 12.5k tokens/s (Llama 70B in FP8 on two H100).
    queue_max_tokens: Annotated[int, Field(ge=1, le=2**48, description="Tokens that wait, in all.")] = 30_000_000
    # As long as the first byte may take.
    queue_wait_max_s: Annotated[
        float, Field(gt=0, le=2_592_000, description="Longest wait; then the caller is told to come again.")
    ] = 3600.0
    # A summary's length; replaced by the measured q99.
    default_output_tokens: Annotated[
        int, Field(ge=1, le=2**31, description="Reserved for an answer without a cap until a q99 has been measured.")
    ] = 1024
    timeouts: Annotated[BatchTimeouts, Field(description="Limits of one call to an engine of this pool.")] = (
        BatchTimeouts()
    )


class Pools(Section):
    """The shapes in which a model is served: chat, batch, or both."""

    chat: Annotated[ChatPool | None, Field(description="The pool for interactive requests.")] = None
    batch: Annotated[BatchPool | None, Field(description="The pool for long and patient requests.")] = None


class Tokenizer(Section):
    """How prompts are counted."""

    # The only kind that needs no file. It bounds by bytes and learns from what the engines count.
    kind: Annotated[
        Literal["huggingface", "tiktoken", "estimate"], Field(description="Where the count comes from.")
    ] = "estimate"
    path: Annotated[
        str | None,
        Field(min_length=1, description="huggingface: the tokenizer's folder or file. tiktoken: the cache folder."),
    ] = None
    encoding: Annotated[str | None, Field(min_length=1, description="tiktoken only: the encoding's name.")] = None
    exact: Annotated[
        Literal["auto", "always"],
        Field(description="`auto` counts exactly where something hangs on it, `always` counts every prompt so."),
    ] = "auto"
    # The upper end of the range that Qwen-VL recommends (1280 patches of 28 x 28 pixels).
    image_tokens: Annotated[int, Field(ge=0, le=1_000_000, description="Charged for every image.")] = 1280
    # Ten times the slowest measured: a million characters took 1.1 s.
    timeout_s: Annotated[float, Field(gt=0, le=600, description="Longest exact count; then the bound holds.")] = 10.0


class Model(Section):
    """One model as clients know it."""

    name: Annotated[ModelName, Field(description="The name clients use.")]
    aliases: list[ModelName] = Field(default=[], max_length=256, description="Other names for it.")
    served_model_name: Annotated[
        ModelName | None, Field(description="The name its engines know; without it, the same.")
    ] = None
    tokenizer: Annotated[Tokenizer, Field(description="How its prompts are counted.")] = Tokenizer()
    threshold_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            le=2**31,
            description="Total demand (prompt and output) up to which a request is chat. "
            "Without it: the chat pool's max_model_len.",
        ),
    ] = None
    # Chat that finds its pool full while no batch prefill runs is served there as fast as anywhere.
    borrow: Annotated[bool, Field(description="Whether chat may use free places of the batch pool.")] = True
    # Turns of a conversation and shared system prompts are half of what a chat engine computes twice otherwise.
    affinity: Annotated[
        bool, Field(description="Whether a request prefers the engine that has the beginning of its prompt cached.")
    ] = True
    # The client's body stays as it is: the ledger reserves a measured q99 instead.
    cap_unset_max_tokens: Annotated[
        bool, Field(description="Whether an output cap is added to requests that set none.")
    ] = False
    # A request that may have started can be paid for twice and answered twice.
    retry_started: Annotated[
        bool, Field(description="Whether what may have started on an engine may be sent again, once.")
    ] = False
    # Two engines that refuse and one relay.
    attempts_max: Annotated[int, Field(ge=1, le=10, description="Tries of one request, relays included.")] = 3
    # Half of the 60 s after which nginx and most load balancers give up on a silent answer.
    commit_after_s: Annotated[
        float, Field(gt=0, le=3600, description="Longest wait for a stream's first event before headers go out.")
    ] = 30.0
    # Chat at 3 requests a second holds about 3 % of a 700k pool; three times that serves a cold start.
    chat_reserve_ratio: Annotated[
        float,
        Field(ge=0, le=0.9, description="Part of a shared engine's KV tokens kept for chat at least; 0 keeps none."),
    ] = 0.1
    pools: Annotated[Pools, Field(description="Its chat pool, its batch pool, or both.")]


class Relay(Section):
    """An outside provider, asked when our own pools cannot answer."""

    name: Annotated[Name, Field(description="Name in logs, metrics and the x-router-relay header.")]
    url: Annotated[str, Field(min_length=1, max_length=2048, description="Base URL, with or without /v1 at its end.")]
    api_key: Annotated[
        str | None,
        Field(pattern=_HEADER_SAFE, json_schema_extra=_SECRET, repr=False, description="Our key at the provider."),
    ] = None
    models: Annotated[
        dict[ModelName, ModelName],
        Field(min_length=1, description="Our model's name to the provider's; a model without an entry is not relayed."),
    ]
    # Batch waits for hours; chat cannot.
    classes: list[Class] = Field(default=["chat"], min_length=1, max_length=2, description="What may be relayed.")
    timeouts: Annotated[Timeouts, Field(description="Limits of one call to the provider.")] = Timeouts()
    # Envoy's outlier detection: 5 consecutive failures, 30 s out.
    breaker_failures: Annotated[int, Field(ge=1, le=1000, description="Failures in a row that open the breaker.")] = 5
    breaker_open_s: Annotated[float, Field(gt=0, le=86_400, description="How long an open breaker stays open.")] = 30.0
    proxy: Annotated[
        str | None,
        Field(
            min_length=1,
            json_schema_extra=_SECRET,
            repr=False,
            description="Proxy URL for this relay; proxy variables of the environment are not used.",
        ),
    ] = None


class Key(Section):
    """A key that clients present."""

    name: Annotated[Name, Field(description="Name in logs and metrics.")]
    key: Annotated[
        str | None,
        Field(
            pattern=_HEADER_SAFE,
            max_length=4096,
            json_schema_extra=_SECRET,
            repr=False,
            description="The key itself, best as ${VAR}. Either this or key_sha256.",
        ),
    ] = None
    key_sha256: Annotated[
        str | None,
        Field(
            pattern=r"^[0-9a-fA-F]{64}$",
            json_schema_extra=_SECRET,
            repr=False,
            description="SHA-256 of the key, 64 hexadecimal digits. Either this or key.",
        ),
    ] = None
    tenant: Annotated[Name | None, Field(description="Whose usage this is; without it, the key's name.")] = None
    # Equal tenants until somebody decides otherwise.
    weight: Annotated[float, Field(gt=0, le=1000, description="Share of the batch queue beside other tenants.")] = 1.0
    default_class: Annotated[
        Class | None, Field(description="Class of its requests that ask for none; without it, by length.")
    ] = None
    # `service_tier: flex` is an ordinary field of OpenAI clients; the others reach into the engine.
    may_set: list[Grant] = Field(default=["class"], max_length=4, description="What its requests may ask for.")
    admin: Annotated[bool, Field(description="Whether it opens the operator's routes.")] = False


class File(Section):
    """pools.yaml"""

    server: Annotated[Server, Field(description="The router's own listener and limits.")] = Server()
    redis: Annotated[Redis, Field(description="The store behind the batch queue.")] = Redis()
    engines: Annotated[list[Engine], Field(min_length=1, max_length=1024, description="Every vLLM server.")]
    models: Annotated[list[Model], Field(min_length=1, max_length=256, description="Every model clients can ask for.")]
    relays: list[Relay] = Field(default=[], max_length=64, description="Outside providers, in the order to try.")
    # Without keys everybody may ask, so the router then listens on loopback only.
    keys: list[Key] = Field(default=[], max_length=10_000, description="Keys that clients present.")


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the file, for editors. A new dict at every call."""
    return finished_json_schema(File)
