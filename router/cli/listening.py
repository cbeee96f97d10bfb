"""Where the router listens: the bound socket, the kernel's part in giving up silent clients, and the files it takes."""

import logging
import resource
import socket
import sys
from dataclasses import replace

from router.config.model import RouterConfig
from router.http.inbound import InboundProtocol

log = logging.getLogger(__name__)

BACKLOG = 2048
_BACKLOG_MIN = 16
#: As long as the router itself waits for a client to read.
_READER_STALL_MS = int(InboundProtocol.reader_stall_s * 1_000)
#: The kernel asks after a silent client when it has heard nothing for so long, and again so often.
_KEEPALIVE_IDLE_S = 60
_KEEPALIVE_EVERY_S = 15
#: Files of each call at most: the client's socket and the engine's. What an engine is asked besides: two probes and two
#: looks at its models. And what a process needs beside them, connections for probes and refusals among it.
_FILES_PER_CALL = 2
_FILES_PER_ENGINE = 4
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


def fitted_to_open_files(config: RouterConfig) -> RouterConfig:
    """Raise this process's limit of open files to what its calls need, as far as the system lets it. Where that is not
    enough, the configuration that is returned has a smaller `connections_max`, and it is said: a call that is refused
    comes again, while a connection that finds no file is reset, a probe's as well."""
    server = config.server
    others = _OTHER_FILES + _FILES_PER_ENGINE * len(config.engines)
    needed = server.connections_max * _FILES_PER_CALL + others + BACKLOG
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed >= needed:
        return config
    # With hardly any files half of them are for calls. A third of those is left to connections that come at once.
    left = allowed - min(others, allowed // 2)
    fitting = min(server.connections_max, max(1, (left - min(BACKLOG, left // 3)) // _FILES_PER_CALL))
    log.warning(
        "this process may open %d files, and server.connections_max %d may need %d: it takes %d calls at one time. "
        "Raise the limit (ulimit -n, LimitNOFILE) or lower connections_max",
        *(allowed, server.connections_max, needed, fitting),
    )
    return replace(config, server=replace(server, connections_max=fitting))


def backlog_for(config: RouterConfig) -> int:
    """How many connections the kernel may keep ready: all are accepted at once, before the first is answered, so there
    must be files for them; whoever finds no room there is not reset, but comes a second later."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return BACKLOG
    others = min(_OTHER_FILES + _FILES_PER_ENGINE * len(config.engines), soft // 2)
    return max(_BACKLOG_MIN, min(BACKLOG, soft - others - config.server.connections_max * _FILES_PER_CALL))


def announce(config: RouterConfig, listener: socket.socket) -> None:
    """The one line on stdout that says where the router listens; scripts wait for it."""
    host = config.server.host
    shown = f"[{host}]" if ":" in host else host
    sys.stdout.write(f"router: serving on http://{shown}:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
