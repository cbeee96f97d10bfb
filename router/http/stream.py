"""An answer on its way out: status and headers, then bytes, and after a cut one well-formed error event.

The answer keeps its lease and socket until the caller's `async with` ends; nothing is taken here.
"""

import logging

from router.errors import ApiError
from router.flow.answer import Answer
from router.http.client import Reply
from router.request import RequestRecord
from router.upstream.api import UpstreamError, UpstreamTimeout

log = logging.getLogger(__name__)

#: Set anew by us or the server in front of us.
_NOT_PASSED_ON = frozenset(
    {b"date", b"server", b"content-length", b"x-request-id", b"transfer-encoding", b"connection"}
)

#: A proxy in between must not hold a stream back (nginx) or keep it.
_STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_STREAM_NAMES = frozenset(name for name, _ in _STREAM_HEADERS)


async def send_answer(answer: Answer, reply: Reply, record: RequestRecord) -> None:
    """Send the whole answer; sets the record's outcome.

    Raises: `ClientLeft`.
    """
    headers: list[tuple[bytes, bytes]] = []
    for pair in answer.headers:
        name = pair[0]
        if name not in _NOT_PASSED_ON and not name.startswith(b"x-router-"):
            headers.append(pair)
    if answer.is_whole and not answer.is_stream:
        await reply.whole(answer.status, headers, answer.preface)
        record.outcome = answer.outcome
        return
    if answer.is_stream:
        headers = [*(pair for pair in headers if pair[0] not in _STREAM_NAMES), *_STREAM_HEADERS]
    else:
        headers += [pair for pair in answer.headers if pair[0] == b"content-length"]
    await reply.start(answer.status, headers, answer.take_preface(), is_stream=answer.is_stream)
    try:
        while chunk := await _more(answer, reply):
            await reply.write(chunk)
            if reply.can_put:
                await answer.forward(reply.put)
    except UpstreamError as error:
        record.outcome = answer.outcome
        log.warning("request %s: the answer was cut: %s", record.request_id, error or type(error).__name__)
        await reply.fail(_cut(error, record))
        return
    record.outcome = answer.outcome
    await reply.end()


async def _more(answer: Answer, reply: Reply) -> bytes:
    """What comes next. Until the client has room nothing is taken from the engine: it would have to be kept."""
    if not reply.has_room:
        answer.hold()
        await reply.room()
    return await answer.read()


def _cut(error: UpstreamError, record: RequestRecord) -> ApiError:
    name = f"relay {record.relay}" if record.relay is not None else f"engine {record.engine}"
    if isinstance(error, UpstreamTimeout):
        return ApiError(
            504, "engine_timeout", f"The {name} sent nothing for {error.limit_s:g} s; the answer ends here, incomplete."
        )
    return ApiError(502, "engine_lost", f"The {name} was lost amid its answer, which ends here, incomplete.")
