"""Rules on engines, models and pools: every name resolves, and the shapes fit into one another."""

import difflib
import re

from router.config.document import Document
from router.config.problems import KeyPath, render
from router.config.schema import BatchPool, ChatPool, File, Model

_ENGINE_NAMES = re.compile(r"engines(\[\d+\](\.name)?)?")
_POOL_ENGINES = re.compile(r"models(\[\d+\](\.pools(\.(chat|batch)(\.engines(\[\d+\])?)?)?)?)?")
_WORKERS: KeyPath = ("server", "workers")


def check_pools(document: Document, file: File) -> None:
    """Notes every broken rule in `document`."""
    _check_engine_names(document, file)
    _check_model_names(document, file)
    users: dict[str, int] = {}
    for number, model in enumerate(file.models):
        _check_engines_of(document, file, number, users)
        _check_shapes(document, number, model)
    _check_unused(document, file, users)
    _check_workers(document, file)


def pools_of(model: Model) -> list[tuple[str, ChatPool | BatchPool]]:
    """The model's pools with their names, chat first."""
    both: list[tuple[str, ChatPool | BatchPool | None]] = [("chat", model.pools.chat), ("batch", model.pools.batch)]
    return [(name, pool) for name, pool in both if pool is not None]


def _check_engine_names(document: Document, file: File) -> None:
    for section, names in (
        ("engines", [engine.name for engine in file.engines]),
        ("relays", [relay.name for relay in file.relays]),
    ):
        first: dict[str, int] = {}
        for number, name in enumerate(names):
            earlier = first.setdefault(name, number)
            if earlier != number:
                document.note((section, number, "name"), f"{section}[{earlier}] has this name already", "Rename one.")


def _check_model_names(document: Document, file: File) -> None:
    first: dict[str, KeyPath] = {}
    for number, model in enumerate(file.models):
        paths: list[tuple[KeyPath, str]] = [(("models", number, "name"), model.name)]
        paths += [(("models", number, "aliases", index), alias) for index, alias in enumerate(model.aliases)]
        for path, name in paths:
            earlier = first.setdefault(name, path)
            if earlier != path:
                message = f"{render(earlier)} is this name already"
                document.note(path, message, "Every model name and alias must be unique.", depends=[earlier])


def _check_engines_of(document: Document, file: File, number: int, users: dict[str, int]) -> None:
    model = file.models[number]
    known = {engine.name: engine for engine in file.engines}
    if not pools_of(model):
        pools: KeyPath = ("models", number, "pools")
        depends = [(*pools, "chat"), (*pools, "batch")]
        document.note(pools, "has neither a chat nor a batch pool", "Add at least one of them.", depends=depends)
    for pool_name, pool in pools_of(model):
        path: KeyPath = ("models", number, "pools", pool_name)
        for index, name in enumerate(pool.engines):
            item = (*path, "engines", index)
            if name in pool.engines[:index]:
                document.note(item, "is in this pool already", "Name each engine of a pool once.")
            if name not in known:
                if not document.any_bad(_ENGINE_NAMES):
                    document.note(item, "is not defined under engines", _nearest(name, list(known)))
                continue
            user = users.setdefault(name, number)
            if user != number:
                message = f"serves model {file.models[user].name} already"
                document.note(item, message, "An engine serves one model: give this one its own.")
            seats = known[name].max_num_seqs
            if seats is not None and pool.max_num_seqs > seats:
                message = f"is above the {seats} sequences of engine {name}"
                document.note((*path, "max_num_seqs"), message, f"Lower it to {seats} or raise the engine's.")


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]}?" if close else f"Define it, or name one of: {', '.join(known[:10])}."


def _check_shapes(document: Document, number: int, model: Model) -> None:
    path: KeyPath = ("models", number)
    chat, batch = model.pools.chat, model.pools.batch
    chat_len, batch_len = (*path, "pools", "chat", "max_model_len"), (*path, "pools", "batch", "max_model_len")
    if chat is not None and model.threshold_tokens is not None and model.threshold_tokens > chat.max_model_len:
        message = f"is above the chat pool's max_model_len ({chat.max_model_len} tokens)"
        fix = f"Lower it to {chat.max_model_len} or raise {render(chat_len)}."
        document.note((*path, "threshold_tokens"), message, fix, depends=[chat_len])
    if chat is not None and batch is not None and chat.max_model_len > batch.max_model_len:
        message = (
            f"is above the batch pool's max_model_len ({batch.max_model_len} tokens), which takes the long requests"
        )
        fix = f"Lower it to {batch.max_model_len} or raise {render(batch_len)}."
        document.note(chat_len, message, fix, depends=[batch_len])
    if batch is not None and batch.queue_max_tokens < batch.max_model_len:
        message = f"is below max_model_len ({batch.max_model_len} tokens): the longest request could never wait"
        queue = (*path, "pools", "batch", "queue_max_tokens")
        document.note(queue, message, f"Raise it to {batch.max_model_len} at least.", depends=[batch_len])
    for name, pool in pools_of(model):
        is_set = "default_output_tokens" in pool.model_fields_set
        if is_set and pool.default_output_tokens >= pool.max_model_len:
            message = f"leaves no room for a prompt in a max_model_len of {pool.max_model_len} tokens"
            pool_path = (*path, "pools", name)
            fix = f"Lower it below {pool.max_model_len}."
            document.note((*pool_path, "default_output_tokens"), message, fix, depends=[(*pool_path, "max_model_len")])


def _check_unused(document: Document, file: File, users: dict[str, int]) -> None:
    if document.any_bad(_POOL_ENGINES):
        return
    for number, engine in enumerate(file.engines):
        if engine.name not in users:
            fix = f"Add {engine.name} to a pool, or remove it here."
            document.note(("engines", number, "name"), "is in no pool", fix)


def _check_workers(document: Document, file: File) -> None:
    """Each worker holds a whole number of seats and lanes of every pool, at least one."""
    workers = file.server.workers
    limits: list[tuple[int, KeyPath]] = []
    for number, model in enumerate(file.models):
        for name, pool in pools_of(model):
            path: KeyPath = ("models", number, "pools", name)
            limits.append((pool.max_num_seqs, (*path, "max_num_seqs")))
            if pool.prefill_lanes is not None:
                limits.append((pool.prefill_lanes, (*path, "prefill_lanes")))
    limits = [(limit, path) for limit, path in limits if not document.is_bad(path)]
    if not limits:
        return
    largest, tightest = min(limits, key=lambda entry: entry[0])
    if workers > largest:
        message = f"each of {workers} workers holds its part of every pool, but {render(tightest)} is {largest}"
        tight = " and ".join(render(path) for limit, path in limits if limit < workers)
        fix = f"The largest number that works is {largest}; or raise {tight} to {workers}."
        document.note(_WORKERS, message, fix)
