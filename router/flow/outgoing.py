"""A request as it goes out to one engine or relay: the client's bytes unless a field must change, and its headers.

Never goes out: the client's credentials, hop-by-hop fields, our own `x-router-*` words, and what the key may not set.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from router.errors import nested_too_deeply
from router.request import ParsedRequest
from router.upstream.api import UpstreamRequest

_RAW_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])

#: Hop-by-hop (RFC 9110, 7.6.1), ours to set anew, or a credential of the client's.
_NEVER_FORWARDED = frozenset(
    {
        "accept-encoding",
        "api-key",
        "authorization",
        "connection",
        "content-encoding",
        "content-length",
        "cookie",
        "expect",
        "forwarded",
        "host",
        "keep-alive",
        "prefer",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
        "x-api-key",
        "x-request-id",
    }
)
#: Headers that only some keys may set, and the name of that permission.
_GUARDED = {"x-vllm-priority": "priority", "x-data-parallel-rank": "data_parallel_rank"}


def client_headers(raw: Iterable[tuple[bytes, bytes]], *, may_set: frozenset[str]) -> Sequence[tuple[str, str]]:
    """The client's headers that may go to an engine. Names that cannot be written as ASCII are left out."""
    pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw]
    named = {token.strip().lower() for name, value in pairs if name == "connection" for token in value.split(",")}
    return tuple(
        (name, value)
        for name, value in pairs
        if name not in _NEVER_FORWARDED
        and name not in named
        and name.isascii()
        and not name.startswith(("x-router-", "x-forwarded-"))
        and (name not in _GUARDED or _GUARDED[name] in may_set)
    )


def to_engine(
    request: ParsedRequest, headers: Sequence[tuple[str, str]], *, served_model_name: str, edits: Mapping[str, Any]
) -> UpstreamRequest:
    """The request for an engine that knows the model as `served_model_name`; `edits` come on top of the request's."""
    changes = {**request.edits, **edits}
    if request.model and request.model != served_model_name:
        changes["model"] = served_model_name
    own = (*headers, ("x-request-id", request.request_id))
    return UpstreamRequest("POST", request.path, own, render_body(request, changes))


def to_relay(request: ParsedRequest, headers: Sequence[tuple[str, str]], *, model: str) -> UpstreamRequest:
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
