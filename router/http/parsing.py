"""Bytes to `ParsedRequest`, once.

Here the client's own mistakes end as 400 with the field named; no engine hears of them. A duplicate key means its
last value, here as in the engine (both parse so), and any rewriting leaves only that one.
"""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
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
from router.http.decoding import check_text, decode, decoding_mistake, look_through
from router.http.head import Head
from router.http.multipart import form_fields
from router.http.texts import SEQUENCES_MAX
from router.policy.classify import Reason
from router.policy.demand import RequestClass
from router.request import ChatPrompt, Endpoint, OpaquePrompt, ParsedRequest, Prompt, TextPrompts, TokenPrompts

#: The largest output cap and number of sequences that can mean anything; above it arithmetic would only overflow.
_TOKENS_MAX = 2**31 - 1
_N_MAX = 1024

#: A member is looked up in its enum for the price of a call; those that every request asks for have names of their own.
_AUDIO = Endpoint.AUDIO
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


#: Most requests go on as they came.
_NO_EDITS: Mapping[str, Any] = MappingProxyType({})


class _OnlyModel(msgspec.Struct):
    model: str | None = None


_MODEL_DECODER = msgspec.json.Decoder(_OnlyModel)


class Read(msgspec.Struct, frozen=True):
    """What of a large body was read before `parse`."""

    body: GenerationBody
    is_crowded: bool


async def read_large(endpoint: Endpoint, head: Head, raw: bytes) -> Read | None:
    """The first steps of `parse`, with turns of the event loop in between; None where they are not large there.

    Raises: as `parse`.
    """
    if endpoint is _AUDIO:
        return None
    _check_content_type(head.text(b"content-type") or "")
    is_crowded = await look_through(raw)
    if endpoint in LIGHT_ENDPOINTS:
        return None
    body = decode(_DECODERS[endpoint], raw)
    await asyncio.sleep(0)
    return Read(body, is_crowded)


def parse(endpoint: Endpoint, path: str, head: Head, raw: bytes, read: Read | None = None) -> ParsedRequest:
    """Read one inference call: `raw` is its body, `path` what the engine is to be asked for; `read`: what of it is read
    already.

    Raises: `ApiError` 400 for anything that is not a well-formed request, 415 for a content type that is not read.
    """
    fields = head.fields
    if endpoint is _AUDIO:
        return _parse_form(endpoint, path, head, raw)
    if fields.get(b"content-type") != b"application/json":
        _check_content_type(head.text(b"content-type") or "")
    if read is None and (not raw or not raw.isascii()):
        check_text(raw)
    if endpoint in LIGHT_ENDPOINTS:
        model = decode(_MODEL_DECODER, raw).model or ""
        return ParsedRequest(head.request_id, endpoint, path, raw, model, OpaquePrompt(0), max_tokens=0)

    if read is None:
        try:
            body = _DECODERS[endpoint].decode(raw)
        except (RecursionError, msgspec.DecodeError) as error:
            raise decoding_mistake(error) from None
    else:
        body = read.body
    cap = body.cap()
    if cap is not None and not 0 <= cap <= _TOKENS_MAX:
        raise _out_of_range(cap, body.cap_field(), 0, _TOKENS_MAX)
    n = 1 if body.n is None else body.n
    if not 1 <= n <= _N_MAX:
        raise _out_of_range(n, "n", 1, _N_MAX)
    try:
        prompt = body.prompt(raw, None if read is None else read.is_crowded)
    except RecursionError:
        # Converting prints parts of the body, some calls deeper than where reading it just succeeded.
        raise nested_too_deeply() from None
    if not isinstance(prompt, ChatPrompt):
        n = _sequences(body, prompt, n)

    stream = body.stream is True
    options = body.stream_options
    edits = _NO_EDITS
    if (
        stream
        or options is not None
        or body.priority is not msgspec.UNSET
        or body.kv_transfer_params is not msgspec.UNSET
    ):
        edits = _edits(endpoint, body, head.may_set, stream=stream)
    hint, hint_source = None, None
    if body.service_tier is not None or b"x-router-class" in fields:
        hint, hint_source = _hint(head, body.service_tier)
    return ParsedRequest(
        head.request_id,
        endpoint,
        path,
        raw,
        body.model or "",
        prompt,
        stream,
        cap,
        n,
        asked_include_usage=stream and options is not None and bool(options.get("include_usage")),
        hint=hint,
        hint_source=hint_source,
        previous_response_id=body.previous_response_id if isinstance(body, ResponsesBody) else None,
        edits=edits,
        prefix=body.prefix(),
    )


def _edits(endpoint: Endpoint, body: GenerationBody, may_set: frozenset[str], *, stream: bool) -> dict[str, Any]:
    """The fields that must change for every engine: what the key may not set, and the usage option."""
    edits: dict[str, Any] = {}
    if body.priority is not msgspec.UNSET and "priority" not in may_set:
        edits["priority"] = None
    if body.kv_transfer_params is not msgspec.UNSET and "kv_transfer_params" not in may_set:
        edits["kv_transfer_params"] = None
    if endpoint in _USAGE_BY_OPTION:
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


def _hint(head: Head, service_tier: str | None) -> tuple[RequestClass | None, str | None]:
    """The class asked for, where this key may ask; the header wins over the tier."""
    hint = head.text(b"x-router-class")
    if hint is not None:
        try:
            asked = RequestClass(hint.strip().lower())
        except ValueError:
            raise bad_request(
                f"The header x-router-class must be `chat` or `batch`, not {hint[:40]!r}.",
                param="x-router-class",
            ) from None
        if "class" in head.may_set:
            return asked, Reason.HINT_HEADER.value
    if service_tier == "flex" and "class" in head.may_set:
        return RequestClass.BATCH, Reason.HINT_SERVICE_TIER.value
    return None, None


def _sequences(body: GenerationBody, prompt: Prompt, n: int) -> int:
    """Sequences of each prompt, of which `n` are asked for. Raises: `ApiError` 400 where all together are too many."""
    if isinstance(body, CompletionsBody) and body.best_of is not None:
        if not 1 <= body.best_of <= _N_MAX:
            raise _out_of_range(body.best_of, "best_of", 1, _N_MAX)
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


def _parse_form(endpoint: Endpoint, path: str, head: Head, raw: bytes) -> ParsedRequest:
    fields = form_fields(raw, head.text(b"content-type") or "", names=("model", "stream"))
    model, stream = fields.get("model"), fields.get("stream")
    if model is None or not model.value:
        raise missing("model")
    return ParsedRequest(
        head.request_id,
        endpoint,
        path,
        raw,
        model.value,
        # The engine cuts audio into pieces of its own: its bytes say nothing of tokens, so it is charged a seat.
        OpaquePrompt(0),
        stream=stream is not None and stream.value.strip().lower() in ("true", "1"),
        max_tokens=0,
        model_span=(model.start, model.end),
    )


def _check_content_type(content_type: str) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            "unsupported_media_type",
            f"This route reads application/json, not {kind[:80] or 'a body without a content type'!r}. "
            "Set the header `Content-Type: application/json`.",
        )


def _out_of_range(value: int, name: str, least: int, most: int) -> ApiError:
    return bad_request(f"`{name}` is {value}; it must be between {least} and {most:,}.", param=name)
