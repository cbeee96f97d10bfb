"""The one way in which a request ends: who ended it, and in which phase.

Every request that reached a route has exactly one `Outcome`; log line, metrics and the sums that tests check come
from it. It is a low-cardinality label: the details are in the error, not here.
"""

from enum import StrEnum


class Outcome(StrEnum):
    """Who x phase."""

    COMPLETED = "completed"
    #: An engine or relay said 4xx: the client's own mistake, passed through untouched.
    CLIENT_ERROR = "client_error"

    REFUSED_UNAUTHENTICATED = "refused_unauthenticated"
    REFUSED_INVALID = "refused_invalid"
    REFUSED_NOT_FOUND = "refused_not_found"
    REFUSED_TOO_LARGE = "refused_too_large"
    REFUSED_TOO_LONG = "refused_too_long"
    #: Engines died of this very prompt.
    REFUSED_QUARANTINED = "refused_quarantined"
    REFUSED_CHAT_FULL = "refused_chat_full"
    REFUSED_QUEUE_FULL = "refused_queue_full"
    REFUSED_QUEUE_DOWN = "refused_queue_down"
    REFUSED_QUEUE_WAIT = "refused_queue_wait"
    REFUSED_NO_ENGINE = "refused_no_engine"
    REFUSED_SHUTDOWN = "refused_shutdown"
    #: The process itself is at a bound: connections, or bytes of request bodies.
    REFUSED_ROUTER_FULL = "refused_router_full"

    CLIENT_LEFT_UPLOAD = "client_left_upload"
    CLIENT_LEFT_WAITING = "client_left_waiting"
    CLIENT_LEFT_PREFILL = "client_left_prefill"
    CLIENT_LEFT_STREAMING = "client_left_streaming"

    ENGINE_ERROR = "engine_error"
    ENGINE_LOST = "engine_lost"
    ENGINE_LOST_STREAMING = "engine_lost_streaming"
    ENGINE_TIMEOUT = "engine_timeout"
    ENGINE_TIMEOUT_STREAMING = "engine_timeout_streaming"

    #: A bug of ours. The message is in the log, not in the answer.
    INTERNAL_ERROR = "internal_error"
