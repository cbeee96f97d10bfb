"""Reading an upstream's answer as far as it takes to know that it is one.

A stream is read up to its first token, a plain answer whole if it is small: until then it can turn out to be an error,
an abort before any token, or nothing at all, and the request may still go elsewhere. What was read is the answer's
`preface`.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.clock import Clock
from router.config.model import TimeoutConfig
from router.errors import ApiError
from router.flow.answer import Answer, Chunks
from router.flow.failure import AttemptFailed, PassOn, empty_abort, from_answer, from_transport
from router.flow.lease import Lease
from router.policy.outcome import Outcome
from router.policy.retry import Failure
from router.request import ParsedRequest, RequestRecord
from router.upstream.api import Upstream, UpstreamError, UpstreamRequest, UpstreamResponse
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
    upstream: Upstream,
    outgoing: UpstreamRequest,
    request: ParsedRequest,
    record: RequestRecord,
    clock: Clock,
    *,
    name: str,
    limits: TimeoutConfig,
    commit_after_s: float,
    lease: Lease | None = None,
    on_output: Callable[[], None] | None = None,
    on_cut: Callable[[], None] | None = None,
) -> Answer:
    """Send `outgoing` to `name` and read its response as far as it takes to know that it is an answer.

    On every failure the response is closed; the lease stays the caller's. Raises: `AttemptFailed`.
    """
    try:
        response = await upstream.open(
            outgoing, connect_s=limits.connect_s, first_byte_s=limits.first_byte_s, idle_s=limits.idle_s
        )
    except UpstreamError as error:
        raise from_transport(error, name) from error
    answer = Answer(
        status=response.status,
        headers=response.headers,
        is_stream=response.status < 400 and _is_event_stream(response.headers),
        response=response,
        chunks=Chunks(response),
        request=request,
        record=record,
        clock=clock,
        lease=lease,
        first_byte_s=limits.first_byte_s,
        on_output=on_output,
        on_cut=on_cut,
    )
    try:
        if response.status >= 400:
            return await _read_error(answer, name)
        if answer.is_stream:
            return await _read_stream_start(answer, name, commit_after_s)
        return await _read_plain(answer, name)
    except UpstreamError as error:
        await answer.close_response()
        raise from_transport(error, name) from error
    except BaseException:
        await answer.close_response()
        raise


def _is_event_stream(headers: Mapping[str, str]) -> bool:
    """Events that can be read: of a compressed stream, which nobody asked for, not a byte may be added or left out."""
    is_plain = headers.get("content-encoding", "identity").strip().lower() == "identity"
    return is_plain and headers.get("content-type", "").lower().startswith("text/event-stream")


async def _read_error(answer: Answer, name: str) -> Answer:
    body = await _read_up_to(answer, _ERROR_MAX_BYTES, _ERROR_S)
    meaning = from_answer(
        answer.status,
        body,
        name,
        retry_after=answer.headers.get("retry-after"),
        content_encoding=answer.headers.get("content-encoding", ""),
        shape=answer.request.endpoint.error_shape,
        is_relay=answer.record.relay is not None,
    )
    if isinstance(meaning, AttemptFailed):
        raise meaning
    return await _pass_on(answer, meaning)


async def _read_stream_start(answer: Answer, name: str, commit_after_s: float) -> Answer:
    found = await answer.read_first_event(commit_after_s=commit_after_s)
    if found is None:
        return answer
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
        return await _pass_on(answer, meaning)
    return answer


async def _read_plain(answer: Answer, name: str) -> Answer:
    """An answer in one piece, up to a bound; a longer one goes through as it comes, and so does a stream that cannot
    be read."""
    assert answer.chunks is not None
    parts: list[bytes] = []
    size = 0
    is_unreadable_stream = answer.headers.get("content-type", "").lower().startswith("text/event-stream")
    while size < _WHOLE_MAX_BYTES and not is_unreadable_stream:
        chunk = await answer.chunks.next()
        if chunk is None:
            answer.chunks = None
            break
        parts.append(answer.pass_on(chunk))
        size += len(chunk)
    answer.preface = b"".join(parts)
    if answer.chunks is None and answer.request.endpoint.generates and body_kind(answer.preface).kind == "abort":
        raise empty_abort(name)
    answer.saw_output()
    return answer


async def _read_up_to(answer: Answer, limit_bytes: int, limit_s: float) -> bytes:
    """What came of the body within both limits: the status is known, and a slow body may not hold the place."""
    assert answer.chunks is not None
    parts: list[bytes] = []
    size = 0
    deadline_s = answer.clock.now_s() + limit_s
    while size < limit_bytes:
        try:
            chunk = await answer.chunks.next(within_s=max(0.0, deadline_s - answer.clock.now_s()))
        except TimeoutError:
            break
        if chunk is None:
            break
        parts.append(chunk)
        size += len(chunk)
    return b"".join(parts)


async def _pass_on(answer: Answer, meaning: PassOn) -> Answer:
    """The engine's refusal becomes the answer; nothing more is read, and its place is free."""
    await answer.aclose()
    answer.status = meaning.status
    answer.headers = {"content-type": "application/json"}
    answer.is_stream = False
    answer.chunks = None
    answer.preface = meaning.body
    answer.outcome = Outcome.CLIENT_ERROR
    return answer


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
    await response.aclose()
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
            async for chunk in response.chunks():
                parts.append(chunk)
                size += len(chunk)
                if size > _FETCH_MAX_BYTES:
                    return None
    except (UpstreamError, TimeoutError):
        return None
    finally:
        await response.aclose()
    return Fetched(response.status, response.headers.get("content-type", "application/json"), b"".join(parts))


async def _open_control(upstream: Upstream, method: str, path: str) -> UpstreamResponse | None:
    try:
        return await upstream.open(
            UpstreamRequest(method, path), connect_s=_CONTROL_S, first_byte_s=_CONTROL_S, idle_s=_CONTROL_S
        )
    except UpstreamError:
        return None
