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
_NOT_PASSED_ON = frozenset({"date", "server", "content-length", "x-request-id", "transfer-encoding", "connection"})


async def send_answer(answer: Answer, reply: Reply, record: RequestRecord) -> None:
    """Send the whole answer; sets the record's outcome.

    Raises: `ClientLeft`.
    """
    headers = {
        name: value
        for name, value in answer.headers.items()
        if name not in _NOT_PASSED_ON and not name.startswith("x-router-")
    }
    whole = answer.chunks is None
    if answer.is_stream and not whole:
        headers.update({"cache-control": "no-cache", "x-accel-buffering": "no"})
    elif not whole and "content-length" in answer.headers:
        headers["content-length"] = answer.headers["content-length"]
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    if whole:
        await reply.whole(answer.status, pairs, answer.preface)
        record.outcome = answer.outcome
        return
    await reply.start(answer.status, pairs, is_stream=answer.is_stream)
    try:
        async for chunk in answer.body():
            await reply.write(chunk)
    except UpstreamError as error:
        record.outcome = answer.outcome
        log.warning("request %s: the answer was cut: %s", record.request_id, error or type(error).__name__)
        await reply.fail(_cut(error, record))
        return
    record.outcome = answer.outcome
    await reply.end()


def _cut(error: UpstreamError, record: RequestRecord) -> ApiError:
    name = f"relay {record.relay}" if record.relay is not None else f"engine {record.engine}"
    if isinstance(error, UpstreamTimeout):
        return ApiError(
            504, "engine_timeout", f"The {name} sent nothing for {error.limit_s:g} s; the answer ends here, incomplete."
        )
    return ApiError(502, "engine_lost", f"The {name} was lost amid its answer, which ends here, incomplete.")
