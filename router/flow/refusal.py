"""What a client is told when there is no place for its request: the error and the one outcome of each case."""

from router.config.model import ModelConfig
from router.errors import ApiError
from router.flow.gate import NoPlace
from router.flow.job import Refusal
from router.flow.line import QueueClosed, QueueFull, QueueWaitOver
from router.policy.decision import RefusalCause
from router.policy.demand import RequestClass
from router.policy.outcome import Outcome
from router.queue.store import EnqueueRefusal, QueueDown

#: A store or a router that is away is back, or replaced, in about this time.
_AWAY_S = 5.0


def no_place(none: NoPlace, model: str, request_class: RequestClass) -> Refusal:
    """The ledger has no place: no engine serves, or all that do are full."""
    if none.cause is RefusalCause.NO_ENGINE:
        error = ApiError(
            503,
            "no_engine_available",
            f"No engine of {model} serves {request_class.value} requests right now. Try again.",
            retry_after_s=none.retry_after_s,
        )
        return Refusal(error, Outcome.REFUSED_NO_ENGINE)
    error = ApiError(
        429,
        "chat_pool_full",
        f"{model} has no room for another chat request within its first-token target. Try again in the time that "
        "Retry-After says.",
        retry_after_s=none.retry_after_s,
    )
    return Refusal(error, Outcome.REFUSED_CHAT_FULL)


def not_queued(
    cause: QueueFull | QueueDown | QueueClosed | QueueWaitOver, model: ModelConfig, tokens: int, retry_after_s: float
) -> Refusal:
    """The batch queue did not take a request of `tokens`, or did not keep it. `retry_after_s`: by measured drain."""
    batch = model.batch
    assert batch is not None, "a queue belongs to a batch pool"
    match cause:
        case QueueFull():
            bound = (
                f"{batch.queue_max_requests:,} requests wait, as many as queue_max_requests allows."
                if cause.refusal is EnqueueRefusal.FULL_REQUESTS
                else f"with the {tokens:,} tokens of this request it would hold more than the "
                f"{batch.queue_max_tokens:,} that queue_max_tokens allows."
            )
            message = f"The batch queue of {model.name} is full: {bound} Send the request again later."
            error = ApiError(429, "batch_queue_full", message, retry_after_s=retry_after_s)
            return Refusal(error, Outcome.REFUSED_QUEUE_FULL)
        case QueueDown():
            message = f"The batch queue of {model.name} is away; chat goes on. Send the request again later."
            error = ApiError(503, "batch_queue_unavailable", message, retry_after_s=_AWAY_S)
            return Refusal(error, Outcome.REFUSED_QUEUE_DOWN)
        case QueueClosed():
            message = "This router is stopping before the request's turn came. Send it again; another one takes it."
            error = ApiError(503, "shutting_down", message, retry_after_s=_AWAY_S)
            return Refusal(error, Outcome.REFUSED_SHUTDOWN)
        case QueueWaitOver():
            message = (
                f"The request waited {batch.queue_wait_max_s:g} s in the batch queue without finding room. Send it "
                "again later."
            )
            error = ApiError(503, "batch_queue_wait_over", message, retry_after_s=retry_after_s)
            return Refusal(error, Outcome.REFUSED_QUEUE_WAIT)
