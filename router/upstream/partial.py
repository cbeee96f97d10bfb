"""Reading what comes of a body where the status alone has said enough.

A refusal counts as the refusal it is, also where its body is slow, endless, or breaks off.
"""

import asyncio

from router.upstream.api import UpstreamError, UpstreamResponse


async def read_partly(response: UpstreamResponse, limit_bytes: int, limit_s: float) -> bytes:
    """What comes of the body until its end, `limit_s`, a failure, or the piece that makes it `limit_bytes`."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limit_s):
            while size < limit_bytes and (chunk := await response.read()):
                parts.append(chunk)
                size += len(chunk)
    except (TimeoutError, UpstreamError):
        pass
    return b"".join(parts)[:limit_bytes]
