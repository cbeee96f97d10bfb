"""Where the router listens: the bound socket, the kernel's part in giving up silent clients, and the files it takes."""

import logging
import resource
import socket
import sys

from router.config.model import RouterConfig
from router.http.inbound import InboundProtocol

log = logging.getLogger(__name__)

BACKLOG = 2048
#: As long as the router itself waits for a client to read.
_READER_STALL_MS = int(InboundProtocol.reader_stall_s * 1_000)
#: The kernel asks after a silent client when it has heard nothing for so long, and again so often.
_KEEPALIVE_IDLE_S = 60
_KEEPALIVE_EVERY_S = 15
#: Files of each call at most: the client's socket and the engine's. And what a process needs beside them.
_FILES_PER_CALL = 2
_OTHER_FILES = 256


def listen(config: RouterConfig) -> socket.socket:
    """The listening socket, bound. Raises: `OSError` with the address in its text."""
    host, port = config.server.host, config.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted sockets inherit it. What was written to a client that reads nothing keeps its connection open
            # even after the server has closed it; only the kernel can end that.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _READER_STALL_MS)
        # And a client that is gone without a word (its machine sleeps, its network is away) while there is nothing to
        # write to it yet, as in a long prefill. It is given up after as long as a silent reader.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_EVERY_S)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}. Set server.port or --port.") from error
    return listener


def allow_open_files(config: RouterConfig) -> None:
    """Raise this process's limit of open files to what its connections need, as far as the system lets it, and say so
    where that is not enough."""
    needed = config.server.connections_max * _FILES_PER_CALL + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning(
            "this process may open %d files, and server.connections_max %d may need %d: raise the limit (ulimit -n, "
            "LimitNOFILE) or lower connections_max",
            allowed,
            config.server.connections_max,
            needed,
        )


def announce(config: RouterConfig, listener: socket.socket) -> None:
    """The one line on stdout that says where the router listens; scripts wait for it."""
    host = config.server.host
    shown = f"[{host}]" if ":" in host else host
    sys.stdout.write(f"router: serving on http://{shown}:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
