"""Bytes to `ParsedRequest`, once.

Here the client's own mistakes end as 400 with the field named; no engine hears of them. A duplicate key means its
last value, here as in the engine (both parse so), and any rewriting leaves only that one.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from router.errors import ApiError, bad_request, nested_too_deeply
from router.http.bodies import (
    ChatBody,
    CompletionsBody,
    GenerationBody,
    MessagesBody,
    PoolingBody,
    ResponsesBody,
    missing,
)
from router.http.decoding import check_text, decode, is_crowded
from router.http.multipart import form_fields
from router.http.texts import SEQUENCES_MAX
from router.policy.classify import Reason
from router.policy.demand import RequestClass
from router.request import Endpoint, OpaquePrompt, ParsedRequest, Prompt, TextPrompts, TokenPrompts

#: The largest output cap and number of sequences that can mean anything; above it arithmetic would only overflow.
_TOKENS_MAX = 2**31 - 1
_N_MAX = 1024

#: Endpoints whose streams carry usage only where `stream_options` asks for it.
_USAGE_BY_OPTION = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS})
#: Endpoints that touch only the engine's tokenizer: no KV tokens, no seat.
LIGHT_ENDPOINTS = frozenset({Endpoint.TOKENIZE, Endpoint.DETOKENIZE, Endpoint.COUNT_TOKENS})

_BODIES: Mapping[Endpoint, type[GenerationBody]] = {
    Endpoint.CHAT: ChatBody,
    Endpoint.COMPLETIONS: CompletionsBody,
    Endpoint.RESPONSES: ResponsesBody,
    Endpoint.MESSAGES: MessagesBody,
    Endpoint.EMBEDDINGS: PoolingBody,
    Endpoint.SCORE: PoolingBody,
    Endpoint.RERANK: PoolingBody,
    Endpoint.POOLING: PoolingBody,
    Endpoint.CLASSIFY: PoolingBody,
}
_DECODERS = {endpoint: msgspec.json.Decoder(body) for endpoint, body in _BODIES.items()}


class _OnlyModel(msgspec.Struct):
    model: str | None = None


_MODEL_DECODER = msgspec.json.Decoder(_OnlyModel)


class Incoming(msgspec.Struct, frozen=True, gc=False):
    """What the route knows before the body is read as JSON. `hint_header` is the value of `x-router-class`."""

    request_id: str
    endpoint: Endpoint
    path: str
    content_type: str
    body: bytes
    hint_header: str | None = None
    may_set: frozenset[str] = frozenset()


def parse(incoming: Incoming) -> ParsedRequest:
    """Read one inference call.

    Raises: `ApiError` 400 for anything that is not a well-formed request, 415 for a content type that is not read.
    """
    if incoming.endpoint is Endpoint.AUDIO:
        return _parse_form(incoming)
    _check_content_type(incoming.content_type)
    check_text(incoming.body)
    endpoint = incoming.endpoint
    if endpoint in LIGHT_ENDPOINTS:
        model = decode(_MODEL_DECODER, incoming.body).model
        return _request(incoming, model=model or "", prompt=OpaquePrompt(0), max_tokens=0)

    body = decode(_DECODERS[endpoint], incoming.body)
    param, cap = body.cap()
    if cap is not None:
        _check_range(cap, param, 0, _TOKENS_MAX)
    if body.n is not None:
        _check_range(body.n, "n", 1, _N_MAX)
    prompt = _prompt(body, incoming.body)
    stream = bool(body.stream)
    hint, hint_source = _hint(incoming, body.service_tier)
    return ParsedRequest(
        request_id=incoming.request_id,
        endpoint=endpoint,
        path=incoming.path,
        body=incoming.body,
        model=body.model or "",
        prompt=prompt,
        stream=stream,
        max_tokens=cap,
        n=_sequences(body, prompt),
        asked_include_usage=stream
        and body.stream_options is not None
        and bool(body.stream_options.get("include_usage")),
        hint=hint,
        hint_source=hint_source,
        previous_response_id=body.previous_response_id if isinstance(body, ResponsesBody) else None,
        edits=_edits(incoming, body, stream=stream),
        prefix=body.prefix(),
    )


def _prompt(body: GenerationBody, raw: bytes) -> Prompt:
    """The prompt of a body whose other fields are read. Raises: `ApiError` 400."""
    body.check_there()
    if is_crowded(raw) and body.has_conversation:
        return OpaquePrompt(len(raw))
    try:
        return body.prompt(len(raw))
    except RecursionError:
        # Converting prints parts of the body, some calls deeper than where reading it just succeeded.
        raise nested_too_deeply() from None


def _edits(incoming: Incoming, body: GenerationBody, *, stream: bool) -> dict[str, Any]:
    """The fields that must change for every engine: what the key may not set, and the usage option."""
    edits: dict[str, Any] = {}
    if body.priority is not msgspec.UNSET and "priority" not in incoming.may_set:
        edits["priority"] = None
    if body.kv_transfer_params is not msgspec.UNSET and "kv_transfer_params" not in incoming.may_set:
        edits["kv_transfer_params"] = None
    if incoming.endpoint in _USAGE_BY_OPTION:
        options = body.stream_options or {}
        if stream and not options.get("include_usage"):
            edits["stream_options"] = {**options, "include_usage": True}
            if "continuous_usage_stats" in options:
                # Without `include_usage` it asked for nothing; with it, every chunk would carry usage.
                edits["stream_options"]["continuous_usage_stats"] = False
        elif not stream and body.stream_options is not None:
            # vLLM answers 400 to the option without a stream; it asks for nothing that is not in the answer anyway.
            edits["stream_options"] = None
    return edits


def _hint(incoming: Incoming, service_tier: str | None) -> tuple[RequestClass | None, str | None]:
    """The class asked for, where this key may ask; the header wins over the tier."""
    if incoming.hint_header is not None:
        try:
            asked = RequestClass(incoming.hint_header.strip().lower())
        except ValueError:
            raise bad_request(
                f"The header x-router-class must be `chat` or `batch`, not {incoming.hint_header[:40]!r}.",
                param="x-router-class",
            ) from None
        if "class" in incoming.may_set:
            return asked, Reason.HINT_HEADER.value
    if service_tier == "flex" and "class" in incoming.may_set:
        return RequestClass.BATCH, Reason.HINT_SERVICE_TIER.value
    return None, None


def _sequences(body: GenerationBody, prompt: Prompt) -> int:
    """Sequences of each prompt. Raises: `ApiError` 400 where all of them together are too many."""
    n = body.n or 1
    if isinstance(body, CompletionsBody) and body.best_of is not None:
        _check_range(body.best_of, "best_of", 1, _N_MAX)
        n = max(n, body.best_of)
    if isinstance(prompt, TextPrompts):
        prompts = len(prompt.texts)
    elif isinstance(prompt, TokenPrompts):
        prompts = len(prompt.lengths_tokens)
    else:
        return n
    if prompts * n > SEQUENCES_MAX:
        raise bad_request(
            f"{prompts:,} prompts with {n} sequences each are more than the {SEQUENCES_MAX:,} sequences that one "
            "request may have. Split it.",
            param="prompt" if isinstance(body, CompletionsBody) else "input",
        )
    return n


def _request(incoming: Incoming, **values: Any) -> ParsedRequest:
    return ParsedRequest(
        request_id=incoming.request_id,
        endpoint=incoming.endpoint,
        path=incoming.path,
        body=incoming.body,
        **values,
    )


def _parse_form(incoming: Incoming) -> ParsedRequest:
    fields = form_fields(incoming.body, incoming.content_type, names=("model", "stream"))
    model, stream = fields.get("model"), fields.get("stream")
    if model is None or not model.value:
        raise missing("model")
    return _request(
        incoming,
        model=model.value,
        # The engine cuts audio into pieces of its own: its bytes say nothing of tokens, so it is charged a seat.
        prompt=OpaquePrompt(0),
        stream=stream is not None and stream.value.strip().lower() in ("true", "1"),
        max_tokens=0,
        model_span=(model.start, model.end),
    )


def _check_content_type(content_type: str) -> None:
    if content_type == "application/json":
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            "unsupported_media_type",
            f"This route reads application/json, not {kind[:80] or 'a body without a content type'!r}. "
            "Set the header `Content-Type: application/json`.",
        )


def _check_range(value: int, name: str, least: int, most: int) -> None:
    if not least <= value <= most:
        raise bad_request(f"`{name}` is {value}; it must be between {least} and {most:,}.", param=name)
