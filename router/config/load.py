"""From a file to a `RouterConfig`: read, validate, apply the rules, translate. Everything wrong is said at once.

The only module (with those it calls) that sees the environment, and the only way to a `RouterConfig` outside tests.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from router.config.document import Document
from router.config.key_rules import check_keys, key_digest, tenant
from router.config.model import (
    EngineConfig,
    KeyConfig,
    ModelConfig,
    PoolConfig,
    RedisConfig,
    RelayConfig,
    RouterConfig,
    Secret,
    ServerConfig,
    TimeoutConfig,
    TokenizerConfig,
)
from router.config.network_rules import check_network
from router.config.pool_rules import check_pools
from router.config.problems import ConfigErrors, KeyPath, Problem
from router.config.reading import read_document
from router.config.schema import BatchPool, ChatPool, File, Model, Timeouts, json_schema
from router.config.tokenizer_rules import check_tokenizers, tokenizer_path
from router.config.urls import parse_base_url
from router.config.validate import validate
from router.policy.demand import RequestClass

__all__ = ["ConfigErrors", "Overrides", "Problem", "json_schema", "load"]

#: What batch may hold of an engine that chat uses too. Source: SageServe releases non-interactive work up to 0.6.
_SHARED_BATCH_KV_RATIO = 0.6


@dataclass(frozen=True, slots=True)
class Overrides:
    """Command-line options that win over the file. A relative `data_dir` is relative to the current folder."""

    host: str | None = None
    port: int | None = None
    workers: int | None = None
    data_dir: Path | None = None


def load(
    path: Path | str, *, environ: Mapping[str, str] | None = None, overrides: Overrides | None = None
) -> RouterConfig:
    """Read and check the file at `path`. `environ` replaces the process's environment, for tests.

    Relative paths in the file are relative to its folder. Nothing is created, opened for writing or connected to.

    Raises: `ConfigErrors` with every problem of the file.
    """
    file_path = Path(path)
    environ = os.environ if environ is None else environ
    document = read_document(file_path, environ)
    _apply(document, overrides or Overrides())
    folder = file_path.absolute().parent
    file = validate(document)
    if file is not None:
        check_network(document, file)
        check_pools(document, file)
        check_tokenizers(document, file, folder, environ)
        check_keys(document, file)
        _check_paths(document, file, folder)
    if document.problems or file is None:
        raise ConfigErrors(tuple(sorted(document.problems, key=lambda problem: problem.line)))
    return _translate(file, file_path.absolute(), environ)


def _apply(document: Document, overrides: Overrides) -> None:
    """Put the options into the tree, so that they meet the same checks as the file."""
    server = document.root.setdefault("server", {})
    if not isinstance(server, dict):
        return
    for option in fields(overrides):
        value = getattr(overrides, option.name)
        if value is None:
            continue
        path: KeyPath = ("server", option.name)
        server[option.name] = str(value.absolute()) if isinstance(value, Path) else value
        document.options[path] = f"--{option.name.replace('_', '-')}"
        document.bad.discard(path)


def _check_paths(document: Document, file: File, folder: Path) -> None:
    """`~` is the shell's; here it would become a folder of that name."""
    paths: list[tuple[KeyPath, str | None]] = [(("server", "data_dir"), file.server.data_dir)]
    paths += [(("models", number, "tokenizer", "path"), one.tokenizer.path) for number, one in enumerate(file.models)]
    for path, text in paths:
        if text is not None and text.startswith("~"):
            document.note(path, "~ is not replaced", "Write ${HOME}, or the whole path.")
    data_dir = folder / file.server.data_dir
    if data_dir.exists() and not data_dir.is_dir():
        document.note(("server", "data_dir"), "is a file", "Name a folder; it is made if it is missing.")


def _translate(file: File, source: Path, environ: Mapping[str, str]) -> RouterConfig:
    folder = source.parent
    server = file.server.model_dump() | {"data_dir": folder / file.server.data_dir}
    return RouterConfig(
        server=ServerConfig(**server),
        redis=RedisConfig(Secret(file.redis.url), file.redis.key_prefix, file.redis.socket_timeout_s),
        engines={
            engine.name: EngineConfig(
                name=engine.name,
                url=parse_base_url(engine.url).text,
                api_key=_secret(engine.api_key),
                capacity_tokens=engine.capacity_tokens,
                max_num_seqs=engine.max_num_seqs,
            )
            for engine in file.engines
        },
        models={model.name: _model(model, tokenizer_path(model.tokenizer, folder, environ)) for model in file.models},
        relays=tuple(
            RelayConfig(
                name=relay.name,
                url=parse_base_url(relay.url).text,
                api_key=_secret(relay.api_key),
                models=dict(relay.models),
                classes=frozenset(map(RequestClass, relay.classes)),
                timeouts=_timeouts(relay.timeouts),
                breaker_failures=relay.breaker_failures,
                breaker_open_s=relay.breaker_open_s,
                proxy=_secret(relay.proxy),
            )
            for relay in file.relays
        ),
        keys=_keys(file),
        source=source,
    )


def _secret(text: str | None) -> Secret | None:
    return None if text is None else Secret(text)


def _timeouts(timeouts: Timeouts) -> TimeoutConfig:
    return TimeoutConfig(timeouts.connect_s, timeouts.first_byte_s, timeouts.idle_s)


def _keys(file: File) -> tuple[KeyConfig, ...]:
    keys = []
    for key in file.keys:
        digest = key_digest(key)
        assert digest is not None
        keys.append(
            KeyConfig(
                name=key.name,
                digest=digest,
                tenant=tenant(key),
                weight=key.weight,
                default_class=None if key.default_class is None else RequestClass(key.default_class),
                may_set=frozenset(key.may_set),
                admin=key.admin,
            )
        )
    return tuple(keys)


def _model(model: Model, path: Path | None) -> ModelConfig:
    chat, batch = model.pools.chat, model.pools.batch
    longest = max(pool.max_model_len for pool in (chat, batch) if pool is not None)
    threshold = model.threshold_tokens or (chat.max_model_len if chat is not None else longest)
    tokenizer = model.tokenizer
    return ModelConfig(
        name=model.name,
        aliases=tuple(model.aliases),
        served_model_name=model.served_model_name or model.name,
        tokenizer=TokenizerConfig(
            kind=tokenizer.kind,
            path=path,
            encoding=tokenizer.encoding,
            exact=tokenizer.exact,
            image_tokens=tokenizer.image_tokens,
            timeout_s=tokenizer.timeout_s,
        ),
        threshold_tokens=threshold,
        chat=None if chat is None else _chat(chat),
        batch=None
        if batch is None
        else _batch(batch, shared=chat is not None and bool({*chat.engines} & {*batch.engines})),
        chat_reserve_ratio=model.chat_reserve_ratio,
        borrow=model.borrow,
        cap_unset_max_tokens=model.cap_unset_max_tokens,
        retry_started=model.retry_started,
        attempts_max=model.attempts_max,
        commit_after_s=model.commit_after_s,
        affinity=model.affinity,
    )


def _chat(pool: ChatPool) -> PoolConfig:
    return PoolConfig(
        request_class=RequestClass.CHAT,
        engines=tuple(pool.engines),
        max_model_len=pool.max_model_len,
        max_num_seqs=pool.max_num_seqs,
        kv_share_ratio=pool.kv_share_ratio,
        prefill_lanes=pool.prefill_lanes,
        timeouts=_timeouts(pool.timeouts),
        default_output_tokens=_default_output_tokens(pool),
        ttft_target_s=pool.ttft_target_s,
        hold_ratio=pool.hold_ratio,
        hold_max_requests=pool.hold_max_requests,
        queue_max_requests=0,
        queue_max_tokens=0,
        queue_wait_max_s=0.0,
    )


def _batch(pool: BatchPool, *, shared: bool) -> PoolConfig:
    default_ratio = _SHARED_BATCH_KV_RATIO if shared else 1.0
    return PoolConfig(
        request_class=RequestClass.BATCH,
        engines=tuple(pool.engines),
        max_model_len=pool.max_model_len,
        max_num_seqs=pool.max_num_seqs,
        kv_share_ratio=default_ratio if pool.kv_share_ratio is None else pool.kv_share_ratio,
        prefill_lanes=pool.prefill_lanes,
        timeouts=_timeouts(pool.timeouts),
        default_output_tokens=_default_output_tokens(pool),
        ttft_target_s=0.0,
        hold_ratio=0.0,
        hold_max_requests=0,
        queue_max_requests=pool.queue_max_requests,
        queue_max_tokens=pool.queue_max_tokens,
        queue_wait_max_s=pool.queue_wait_max_s,
    )


def _default_output_tokens(pool: ChatPool | BatchPool) -> int:
    """As set; where it is not set, at most half of a short context."""
    if "default_output_tokens" in pool.model_fields_set:
        return pool.default_output_tokens
    return max(1, min(pool.default_output_tokens, pool.max_model_len // 2))
