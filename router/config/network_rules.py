"""Rules on addresses: where we listen, whom we call, and that nothing calls itself."""

import re
from urllib.parse import urlsplit

from router.config import redis_url
from router.config.document import Document
from router.config.problems import KeyPath
from router.config.schema import File, Relay
from router.config.urls import BadUrl, BaseUrl, is_host, is_loopback, leads_here, parse_base_url

_MODEL_NAMES = re.compile(r"models(\[\d+\](\.name)?)?")
_HOST: KeyPath = ("server", "host")
_PORT: KeyPath = ("server", "port")


def check_network(document: Document, file: File) -> None:
    """Notes every broken rule in `document`."""
    _check_listener(document, file)
    _check_redis(document, file)
    _check_engines(document, file)
    for number, relay in enumerate(file.relays):
        _check_relay(document, file, number, relay)


def _check_listener(document: Document, file: File) -> None:
    host = file.server.host
    if not is_host(host):
        document.note(_HOST, "is neither a name nor an address", "Write the host alone, such as 127.0.0.1 or ::1.")
    elif not file.keys and not is_loopback(host):
        message = "without keys the router may listen on this machine only"
        document.note(_HOST, message, "Add a key under keys, or set host to 127.0.0.1.", depends=[("keys",)])
    if file.server.body_max_bytes > file.server.buffered_max_bytes:
        path = ("server", "body_max_bytes")
        limit = file.server.buffered_max_bytes
        message = f"is above buffered_max_bytes ({limit} bytes), so that the largest body could never be taken"
        fix = f"Lower it to {limit} or raise server.buffered_max_bytes."
        document.note(path, message, fix, depends=[("server", "buffered_max_bytes")])


def _check_redis(document: Document, file: File) -> None:
    url = file.redis.url
    if url == "embedded":
        return
    try:
        redis_url.parse(url)
    except ValueError as error:
        document.note(("redis", "url"), str(error), "Correct the URL, or write `embedded` for the built-in store.")


def _check_engines(document: Document, file: File) -> None:
    first: dict[tuple[str, int, str], int] = {}
    for number, engine in enumerate(file.engines):
        path = ("engines", number, "url")
        url = _parsed(document, path, engine.url)
        if url is None:
            continue
        _refuse_loop(document, file, path, url)
        earlier = first.setdefault(url.identity, number)
        if earlier != number:
            other = file.engines[earlier].name
            message = f"engine {other} has this address already"
            fix = f"Give {engine.name} its own, or take it out and use {other} in both pools."
            document.note(path, message, fix, depends=[("engines", earlier, "url"), ("engines", earlier, "name")])


def _check_relay(document: Document, file: File, number: int, relay: Relay) -> None:
    path = ("relays", number)
    url = _parsed(document, (*path, "url"), relay.url)
    if url is not None:
        _refuse_loop(document, file, (*path, "url"), url)
    if relay.proxy is not None and not _is_proxy(relay.proxy):
        document.note((*path, "proxy"), "is not a proxy's URL", "Write http://host:port or https://host:port.")
    names = {model.name for model in file.models}
    owners = {alias: model.name for model in file.models for alias in model.aliases}
    for ours in relay.models:
        is_stand_in = (*path, "models", ours) not in document.places
        if ours in names or is_stand_in or document.any_bad(_MODEL_NAMES):
            continue
        fix = f"Write the model's name, {owners[ours]}." if ours in owners else f"Known: {', '.join(sorted(names))}."
        document.note((*path, "models", ours), "is set for a model that is not defined", fix)


def _is_proxy(proxy: str) -> bool:
    try:
        parts = urlsplit(proxy)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _parsed(document: Document, path: KeyPath, url: str) -> BaseUrl | None:
    try:
        return parse_base_url(url)
    except BadUrl as error:
        document.note(path, error.message, error.fix)
        return None


def _refuse_loop(document: Document, file: File, path: KeyPath, url: BaseUrl) -> None:
    if leads_here(url, file.server.host, file.server.port):
        message = f"is the address on which the router itself listens ({file.server.host} port {file.server.port})"
        document.note(path, message, "Write the address of the other server.", depends=[_HOST, _PORT])
