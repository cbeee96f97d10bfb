"""Reading an upstream's answer as far as it takes to know that it is one.

A stream is read up to its first token, a plain answer whole if it is small: until then it can turn out to be an error,
an abort before any token, or nothing at all, and the request may still go elsewhere. What was read is the answer's
`preface`.
"""

import asyncio
from dataclasses import dataclass

from router.config.model import TimeoutConfig
from router.errors import ApiError
from router.flow.answer import Answer
from router.flow.failure import AttemptFailed, empty_abort, from_answer, from_transport
from router.flow.lease import Lease
from router.flow.target import Target
from router.policy.outcome import Outcome
from router.policy.retry import Failure
from router.request import ParsedRequest, RequestRecord
from router.upstream.api import Upstream, UpstreamError, UpstreamRequest, UpstreamResponse
from router.upstream.headers import first
from router.upstream.partial import read_partly
from router.upstream.sse import body_kind

#: Error bodies are read up to here, and for so long; an engine's longest are a few kB and come at once.
_ERROR_MAX_BYTES = 256 * 1024
_ERROR_S = 10.0
#: An answer that is not streamed is read whole up to here, so that an empty abort can still be tried again.
_WHOLE_MAX_BYTES = 1024 * 1024
#: Control calls: an answer that a person waits for, all of it, and the largest one worth keeping.
_CONTROL_S = 5.0
_FETCH_S = 30.0
_FETCH_MAX_BYTES = 16 * 1024 * 1024


async def ask(
    target: Target,
    outgoing: UpstreamRequest,
    request: ParsedRequest,
    record: RequestRecord,
    limits: TimeoutConfig,
    lease: Lease | None = None,
) -> Answer:
    """Send `outgoing` to `target` and read its response as far as it takes to know that it is an answer.

    On every failure the response is closed; the lease stays the caller's. Raises: `AttemptFailed`.
    """
    first_byte_s = limits.first_byte_s
    try:
        response = await target.upstream.open(
            outgoing, connect_s=limits.connect_s, first_byte_s=first_byte_s, idle_s=limits.idle_s
        )
    except UpstreamError as error:
        raise from_transport(error, target.name) from error
    status = response.status
    content_type = first(response.headers, b"content-type")
    says_stream = content_type is not None and content_type.lower().startswith(b"text/event-stream")
    is_stream = says_stream and status < 400 and _is_readable(response)
    answer = Answer(response, request, record, target, lease, first_byte_s, is_stream)
    try:
        if status >= 400:
            await _read_error(answer, target.name)
        elif is_stream:
            await _read_stream_start(answer, target.name, target.commit_after_s)
        elif says_stream:
            # It cannot be read, and goes through as it comes.
            answer.saw_output()
        else:
            body = response.whole()
            if body is None:
                body = await answer.read_whole(_WHOLE_MAX_BYTES)
            if body is None:
                # A long one goes through as it comes.
                answer.saw_output()
            # Only a body with the word in it can be one.
            elif b'"abort"' in body and request.endpoint.generates and body_kind(body).kind == "abort":
                raise empty_abort(target.name)
            else:
                answer.take_whole(body)
    except UpstreamError as error:
        response.close()
        raise from_transport(error, target.name) from error
    except BaseException:
        response.close()
        raise
    return answer


def _is_readable(response: UpstreamResponse) -> bool:
    """Of a compressed stream, which nobody asked for, not a byte may be added or left out."""
    return (response.header(b"content-encoding") or b"identity").strip().lower() == b"identity"


async def _read_error(answer: Answer, name: str) -> None:
    response = answer.response
    body = await read_partly(response, _ERROR_MAX_BYTES, _ERROR_S)
    retry_after = response.header(b"retry-after")
    meaning = from_answer(
        answer.status,
        body,
        name,
        retry_after=None if retry_after is None else retry_after.decode("latin-1"),
        content_encoding=(response.header(b"content-encoding") or b"").decode("latin-1"),
        shape=answer.request.endpoint.error_shape,
        is_relay=answer.record.relay is not None,
    )
    if isinstance(meaning, AttemptFailed):
        raise meaning
    answer.replace(meaning.status, meaning.body)


async def _read_stream_start(answer: Answer, name: str, commit_after_s: float) -> None:
    found = await answer.read_first_event(commit_after_s=commit_after_s)
    if found is None:
        return
    if found.kind == "abort":
        raise empty_abort(name)
    if found.kind == "done" and not answer.preface:
        api = ApiError(502, "engine_lost", f"{name} ended its stream before the first event.")
        raise AttemptFailed(Failure.LOST, api, Outcome.ENGINE_LOST)
    if found.kind == "error":
        status = found.code if found.code is not None and 400 <= found.code < 600 else 500
        body = ApiError(status, "engine_refused", found.message).body()
        shape, is_relay = answer.request.endpoint.error_shape, answer.record.relay is not None
        meaning = from_answer(status, body, name, shape=shape, is_relay=is_relay)
        if isinstance(meaning, AttemptFailed):
            raise meaning
        answer.replace(meaning.status, meaning.body)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A small answer read whole."""

    status: int
    content_type: str
    body: bytes


async def status_of(upstream: Upstream, method: str, path: str) -> int | None:
    """The status alone of a control call, its body left unread; None if it fails or takes too long for a person."""
    response = await _open_control(upstream, method, path)
    if response is None:
        return None
    response.close()
    return response.status


async def fetch(upstream: Upstream, method: str, path: str) -> Fetched | None:
    """One control call; None if it fails, takes longer than a person would wait, or says more than 16 MiB."""
    response = await _open_control(upstream, method, path)
    if response is None:
        return None
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_FETCH_S):
            while chunk := await response.read():
                parts.append(chunk)
                size += len(chunk)
                if size > _FETCH_MAX_BYTES:
                    return None
    except (UpstreamError, TimeoutError):
        return None
    finally:
        response.close()
    content_type = response.header(b"content-type") or b"application/json"
    return Fetched(response.status, content_type.decode("latin-1"), b"".join(parts))


async def _open_control(upstream: Upstream, method: str, path: str) -> UpstreamResponse | None:
    try:
        return await upstream.open(
            UpstreamRequest(method, path), connect_s=_CONTROL_S, first_byte_s=_CONTROL_S, idle_s=_CONTROL_S
        )
    except UpstreamError:
        return None
