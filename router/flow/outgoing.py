"""A request as it goes out to one engine or relay: the client's bytes unless a field must change, and its headers.

Never goes out: the client's credentials, hop-by-hop fields, our own `x-router-*` words, and what the key may not set.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from router.errors import nested_too_deeply
from router.request import ParsedRequest
from router.upstream.api import Headers, UpstreamRequest
from router.upstream.headers import NEVER_SENT, named_in_connection

_RAW_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])

#: Besides what no connection sends on: what is ours to say, or was already obeyed.
_NEVER_FORWARDED = NEVER_SENT | {b"content-encoding", b"forwarded", b"prefer", b"via", b"x-request-id"}
_NEVER_FORWARDED_PREFIXES = (b"x-router-", b"x-forwarded-")
#: Headers that only some keys may set, and the name of that permission.
_GUARDED = {b"x-vllm-priority": "priority", b"x-data-parallel-rank": "data_parallel_rank"}
#: What nearly every client says of its connection: it names no field.
_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close"})


def client_headers(raw: Iterable[tuple[bytes, bytes]], *, may_set: frozenset[str]) -> Headers:
    """The client's headers that may go to an engine; `raw` has lower-case names, as ASGI gives them."""
    kept: list[tuple[bytes, bytes]] = []
    named: list[bytes] = []
    for pair in raw:
        name, value = pair
        if name in _NEVER_FORWARDED:
            if name == b"connection" and value not in _PLAIN_CONNECTION:
                named.append(value)
        elif not name.startswith(_NEVER_FORWARDED_PREFIXES) and (name not in _GUARDED or _GUARDED[name] in may_set):
            kept.append(pair)
    if not named:
        return kept
    dropped = named_in_connection(named)
    return [pair for pair in kept if pair[0] not in dropped]


def to_engine(
    request: ParsedRequest, headers: Headers, served_model_name: str, edits: Mapping[str, Any]
) -> UpstreamRequest:
    """The request for an engine that knows the model as `served_model_name`; `edits` come on top of the request's."""
    changes: Mapping[str, Any] = {**request.edits, **edits} if edits else request.edits
    if request.model and request.model != served_model_name:
        changes = {**changes, "model": served_model_name}
    own = [*headers, (b"x-request-id", request.request_id.encode("latin-1"))]
    body = render_body(request, changes) if changes else request.body
    return UpstreamRequest("POST", request.path, own, body)


def to_relay(request: ParsedRequest, headers: Headers, *, model: str) -> UpstreamRequest:
    """The request for a provider that knows the model as `model`: no query string, no field that only vLLM's scheduler
    reads. Which headers a provider may see is the relay's to say."""
    changes = {**request.edits, "priority": None, "kv_transfer_params": None, "model": model}
    return UpstreamRequest("POST", request.path.partition("?")[0], headers, render_body(request, changes))


def render_body(request: ParsedRequest, edits: Mapping[str, Any]) -> bytes:
    """The body to send on: the client's own bytes, or with `edits` (None removes a field) laid over its top level.

    Untouched values keep their bytes. Of a multipart form only the model's name can change.
    Raises: `ApiError` 400 for JSON too deep to be read here, some calls deeper than where it was read first.
    """
    if request.model_span is not None:
        start, end = request.model_span
        name = edits.get("model", request.model).encode()
        return request.body if name == request.body[start:end] else request.body[:start] + name + request.body[end:]
    if not edits:
        return request.body
    try:
        fields: dict[str, Any] = dict(_RAW_DECODER.decode(request.body))
        for name, value in edits.items():
            if value is None:
                fields.pop(name, None)
            else:
                fields[name] = value
        return msgspec.json.encode(fields)
    except RecursionError:
        raise nested_too_deeply() from None
