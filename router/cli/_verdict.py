"""Whether a demo run went as it must, by what the clients got and by what the engines themselves saw.

Decides: every arrival has one outcome; nothing of batch size reached the chat engine; no chat was answered by the batch
engine unless it was borrowed; nothing failed without an explanation. Pure: results and logs are given.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.policy.demand import RequestClass
from router.sim.load import RequestResult
from router.sim.measures import percent_word, stats
from router.sim.report import Summary, summarize

_PERCENTS = (50.0, 90.0, 99.0)
#: What is listed of misrouted or unexplained requests; the counts are complete.
_PROBLEMS_MAX = 20
#: Refusals that are an answer: the server said why and when to come again.
_EXPLAINED = ("http_429", "http_503")


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as a simulated engine logged it. `request_id` is what the router sent along, if it did."""

    prompt_tokens: int
    request_id: str | None
    status: int | None


@dataclass(frozen=True, slots=True)
class Sight:
    """What each simulator saw, and the threshold (tokens) between chat and batch."""

    chat: Sequence[Seen]
    batch: Sequence[Seen]
    relay: Sequence[Seen]
    threshold_tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """`misrouted` counts by class; `problems` are sentences, the first 20 of `problem_count`."""

    misrouted: Mapping[RequestClass, int]
    problems: tuple[str, ...]
    problem_count: int

    @property
    def is_good(self) -> bool:
        return self.problem_count == 0


def judge(results: Sequence[RequestResult], arrived: Mapping[RequestClass, int], sight: Sight) -> Verdict:
    """Look for everything that must not be."""
    misrouted = dict.fromkeys(RequestClass, 0)
    problems: list[str] = []
    arrivals, outcomes = sum(arrived.values()), len(results)
    if arrivals != outcomes:
        problems.append(f"{arrivals} requests arrived but {outcomes} have an outcome")
    for seen in sight.chat:
        if seen.prompt_tokens >= sight.threshold_tokens:
            misrouted[RequestClass.BATCH] += 1
            problems.append(f"the chat engine saw a prompt of {seen.prompt_tokens} tokens")
    chats_in_batch = _chat_ids(sight)
    for result in results:
        if _is_lost_chat(result, chats_in_batch):
            misrouted[RequestClass.CHAT] += 1
            problems.append(f"chat {result.index} was answered by the batch engine, reason {result.router.reason}")
        if result.is_failed and not (result.ending in _EXPLAINED and result.reason):
            problems.append(f"{result.request_class} {result.index} ended as {result.ending}: {result.reason or '?'}")
    return Verdict(misrouted, tuple(problems[:_PROBLEMS_MAX]), len(problems))


def _chat_ids(sight: Sight) -> frozenset[str]:
    """Ids of the short prompts in the batch engine's log. The router's probes are there too: no result has theirs."""
    short = (seen.request_id for seen in sight.batch if seen.prompt_tokens < sight.threshold_tokens)
    return frozenset(request_id for request_id in short if request_id is not None)


def _is_lost_chat(result: RequestResult, chats_in_batch: frozenset[str]) -> bool:
    if result.request_class is not RequestClass.CHAT or result.router.relay is not None:
        return False
    answered_by_batch = result.router.pool == RequestClass.BATCH or result.router.request_id in chats_in_batch
    return answered_by_batch and "borrow" not in (result.router.reason or "")


def demo_fields(
    results: Sequence[RequestResult],
    arrived: Mapping[RequestClass, int],
    sight: Sight,
    verdict: Verdict,
    *,
    duration_s: float,
) -> dict[str, Any]:
    """The one JSON object of `router demo --once --json`."""
    total = summarize(results, duration_s=duration_s, slos=(), percentiles=_PERCENTS)
    return {
        "ok": verdict.is_good,
        "arrivals": sum(arrived.values()),
        "outcomes_sum": sum(total.outcomes.values()),
        "misrouted": sum(verdict.misrouted.values()),
        "problem_count": verdict.problem_count,
        "problems": list(verdict.problems),
        "duration_s": round(duration_s, 3),
        "classes": {
            item.value: _class_fields(item, results, arrived[item], verdict.misrouted[item], duration_s)
            for item in RequestClass
        },
        "totals": _fields(total),
        "engines": {
            "chat": _seen_fields(sight.chat, sight.threshold_tokens),
            "batch": _seen_fields(sight.batch, sight.threshold_tokens),
            "relay": _seen_fields(sight.relay, sight.threshold_tokens),
        },
    }


def _class_fields(
    request_class: RequestClass, results: Sequence[RequestResult], sent: int, misrouted: int, duration_s: float
) -> dict[str, Any]:
    own = [result for result in results if result.request_class is request_class]
    summary = summarize(own, duration_s=duration_s, slos=(), percentiles=_PERCENTS)
    return {"sent": sent, **_fields(summary), "misrouted": misrouted}


def _fields(summary: Summary) -> dict[str, Any]:
    return {
        "completed": summary.completed,
        "failed": summary.failed,
        "interrupted": summary.interrupted,
        "outcomes": dict(summary.outcomes),
        "by_pool": dict(summary.by_pool),
        "by_engine": dict(summary.by_engine),
        "by_relay": dict(summary.by_relay),
        "ttft_ms": _percentiles(summary, "ttft"),
        "e2el_ms": _percentiles(summary, "e2el"),
        "queue_wait_ms": _percentiles(summary, "queue_wait"),
        "prompt_tokens": summary.total_input_tokens,
        "completion_tokens": summary.total_output_tokens,
        "late_sends": summary.late_sends,
    }


def _percentiles(summary: Summary, metric: str) -> dict[str, float | None]:
    figures = summary.metrics[metric]
    return {
        percent_word(percent): round(value, 1) if figures.samples else None for percent, value in figures.percentiles
    }


def _seen_fields(seen: Sequence[Seen], threshold_tokens: int) -> dict[str, Any]:
    short = [entry.prompt_tokens for entry in seen if entry.prompt_tokens < threshold_tokens]
    return {
        "requests": len(seen),
        "chat_size": len(short),
        "batch_size": len(seen) - len(short),
        "longest_prompt_tokens": max((entry.prompt_tokens for entry in seen), default=0),
        "statuses": {str(status): count for status, count in sorted(Counter(map(_status, seen)).items())},
        "prompt_tokens_p50": round(stats([entry.prompt_tokens for entry in seen], ()).median),
    }


def _status(entry: Seen) -> str:
    return "none" if entry.status is None else str(entry.status)
