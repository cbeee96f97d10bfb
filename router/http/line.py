"""The line to one client: it is read from, written to, waited for, and ended.

uvicorn's protocol for httptools is the base, so that its server counts these connections and shuts them down; what it
does for each request is replaced.

Rules:
- Whose client is gone (its end of file, a reset, nothing taken for too long) loses its call at once.
- What waits for a client that does not read is counted among the bytes that the process may hold; where there is no
  more room for it, the client is given up.
- After a refusal nothing more is taken from the connection. It is read a little longer, because a socket that is
  closed over unread bytes is reset, and the answer lost with it.

What a request is, and when one is refused, is for `inbound` to say.
"""

import asyncio
import logging
import sys
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from router.alarm import NEVER
from router.errors import ApiError
from router.http import doorstep
from router.http.deadline import Deadline
from router.http.exchange import Exchange
from router.http.pace import untaken_bytes
from router.http.upload import BufferBudget

log = logging.getLogger(__name__)

#: Of a stream whose client does not read: what waits for the client, and what was read of the engine before it was told
#: to wait.
_STREAM_BYTES = 384 * 1024


class ClientLine(HttpToolsProtocol):
    """One connection. The class's settings are the limits."""

    #: A client that takes no byte of its answer for so long is given up.
    reader_stall_s = 300.0
    #: How long a refused connection is still read.
    linger_s = 2.0
    #: What one connection may send for nothing.
    discard_max_bytes = 8 * 2**20
    #: Where the bytes are counted that wait for clients.
    buffers = BufferBudget(sys.maxsize)

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        #: The request under way, until all of its answer is written.
        self._exchange: Exchange | None = None
        self.is_read_paused = False
        self.is_write_paused = False
        self._deadline = Deadline(self.loop)
        #: Between the end of a request's headers and its own end.
        self._in_body = False
        #: Whatever comes is thrown away.
        self._is_deaf = False
        self._discarded_bytes = 0
        #: Bytes written that the client had not taken when it was last looked at.
        self._untaken_bytes = 0
        #: Taken from `buffers` while the client does not read.
        self._held_bytes = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
        self._lose_client()
        self._deadline.stop()
        self.is_write_paused = False
        self._give_back()
        if exc is None:
            self.transport.close()
        # The parser holds on to this protocol. The base class does the same.
        self.parser = None  # type: ignore[assignment]

    def eof_received(self) -> None:
        """A client that closed its sending side has left: nobody could tell it from one that is gone for good."""
        self._lose_client()

    def shutdown(self) -> None:
        """uvicorn's: end now, or after the answer under way."""
        if self._exchange is None:
            self.transport.close()
        else:
            self._exchange.keep_alive = False

    # -- reading and writing -----------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        self.is_read_paused = True
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        self.is_read_paused = False
        self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.is_write_paused = True
        # This is said before the kernel was offered the bytes: what it does not take is known in the next turn.
        self.loop.call_soon(self._hold)

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self._give_back()
        if self._exchange is not None:
            self._deadline.deadline_s = NEVER
            self._exchange.wake()

    def _hold(self) -> None:
        """Count what waits for the client, which does not take it as fast as it comes."""
        if not self.is_write_paused or self._held_bytes:
            return
        size_bytes = self.transport.get_write_buffer_size()
        if self._exchange is not None:
            size_bytes = max(size_bytes, _STREAM_BYTES)
        try:
            self.buffers.take(size_bytes)
        except ApiError:
            log.warning("a client that does not read was given up: the router holds as much as it may")
            self._lose_client()
            self.transport.abort()
        else:
            self._held_bytes = size_bytes

    def _give_back(self) -> None:
        size_bytes, self._held_bytes = self._held_bytes, 0
        self.buffers.give_back(size_bytes)

    def awaits_reader(self) -> None:
        """From now on it has to read."""
        self._untaken_bytes = untaken_bytes(self.transport)
        self._deadline.set(self.reader_stall_s, self._look_at_reader)

    def _look_at_reader(self) -> None:
        """The client is slow, or gone without a word: only one that takes something may go on."""
        if untaken_bytes(self.transport) < self._untaken_bytes:
            self.awaits_reader()
        else:
            self._lose_client()
            self.transport.abort()

    # -- ending ------------------------------------------------------------------------------------------------------

    def _lose_client(self) -> None:
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            self._deadline.deadline_s = NEVER
            exchange.lose()

    def _go_deaf(self) -> None:
        self._is_deaf = True
        if self._exchange is not None:
            self._exchange.keep_alive = False

    def _discard(self, data: bytes) -> None:
        self._discarded_bytes += len(data)
        if self._discarded_bytes > self.discard_max_bytes:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer with `error`, unless this request already has (some of) an answer, and end the connection."""
        is_answered = self._in_body and (self._exchange is None or self._exchange.is_out)
        # The call hears that its client is gone; what it says from now on goes nowhere.
        self._lose_client()
        self._is_deaf = True
        if is_answered or self.transport.is_closing():
            self.transport.close()
            return
        self.transport.write(doorstep.written(error, self.server_state.default_headers))
        self._linger()

    def _linger(self) -> None:
        """End the connection, but read on for a while."""
        self._is_deaf = True
        self.transport.write_eof()
        if self.is_read_paused:
            self.resume_reading()
        self._deadline.set(self.linger_s, self._end)

    def _end(self) -> None:
        """What was written is either taken by now, or has to be waited for."""
        if self.transport.get_write_buffer_size():
            self.transport.close()
        else:
            self.transport.abort()
