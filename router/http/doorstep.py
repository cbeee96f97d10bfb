"""What a client is told before its request has a route: in OpenAI's shape, on a connection that ends with it. And for
which paths the door is always open."""

import logging
import secrets
from collections.abc import Iterable
from http import HTTPStatus

from router.errors import ApiError

log = logging.getLogger(__name__)

#: Routes that need no key and are served however full it is: probes of load balancers and scrapes of Prometheus.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})

#: Time for some connections to end.
_FULL_RETRY_AFTER_S = 5


def written(error: ApiError, defaults: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The whole answer, with the server's default headers and an id of its own, which is logged."""
    request_id = "req-" + secrets.token_hex(12)
    log.info("refused before its route: request %s, %s", request_id, error)
    body = error.body()
    headers = {
        **error.response_headers(),
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": request_id,
    }
    pairs = [*defaults, *((name.encode(), value.encode()) for name, value in headers.items())]
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    lines.extend(name + b": " + value for name, value in pairs)
    return b"\r\n".join([*lines, b"", body])


def malformed() -> ApiError:
    return ApiError(400, "malformed_request", "What came is no well-formed HTTP request. Mend it.")


def no_host(hosts: int) -> ApiError:
    text = f"A request has one Host header, and this one has {hosts}. Send it with one."
    return ApiError(400, "malformed_request", text)


def head_too_late(limit_s: float) -> ApiError:
    text = f"The request's headers were not complete within {limit_s:g} s. Send it again."
    return ApiError(408, "request_headers_timeout", text)


def head_too_large(max_bytes: int) -> ApiError:
    return ApiError(
        431,
        "request_headers_too_large",
        f"The request line and headers are more than {max_bytes:,} bytes. Send less of them.",
    )


def too_many(connections: int) -> ApiError:
    return ApiError(
        503,
        "too_many_connections",
        f"The router has {connections:,} connections and takes no more (server.connections_max). Try again.",
        retry_after_s=_FULL_RETRY_AFTER_S,
    )
