"""The router's own Prometheus series: all of them, and nowhere else.

Every label has a bound: classes, outcomes and reasons are enums; models, engines, relays and tenants come from the
configuration, and what is not in it is `unknown`. Request series are written once, from the finished `RequestRecord`,
so that arrivals equal the sum of outcomes.

With several worker processes the counters live in files of a shared directory (prometheus-client's multiprocess mode)
and `/metrics` of any worker adds them up.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
    values,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from router.policy.admission import AdmissionSnapshot
from router.policy.demand import RequestClass
from router.policy.ledger import LedgerSnapshot
from router.request import RequestRecord

CONTENT_TYPE = CONTENT_TYPE_LATEST
UNKNOWN = "unknown"

#: 1 ms (the router's own overhead) to 10 min (a long prefill) in steps of about 2, then up to the longest queue wait.
SECONDS_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 10800, 28800,
)  # fmt: skip
TOKENS_BUCKETS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)

GaugeMode = Literal["livesum", "livemax", "livemin"]


class Metrics:
    """All series of one process. `shared_dir`: where worker processes keep theirs; None for a single process."""

    def __init__(self, *, shared_dir: Path | None = None) -> None:
        self._shared_dir = shared_dir
        self._registry = CollectorRegistry()
        self._request_series()
        self._flow_series()
        self._state_series()

    def _request_series(self) -> None:
        counter, histogram = self._counter, self._histogram
        self.arrivals = counter("router_arrivals", "Requests that reached a route", ())
        self.requests = counter(
            "router_requests",
            "Finished requests by outcome",
            ("endpoint", "model", "class", "pool", "target", "outcome"),
        )
        self.in_flight = self._gauge("router_in_flight_requests", "Requests being worked on", (), "livesum")
        self.classified = counter("router_classified", "Pool decisions by reason", ("model", "class", "reason"))
        self.counted = counter("router_counted", "Prompts by the way they were counted", ("model", "method"))
        self.count_misses = counter(
            "router_count_misses", "Prompts whose real length was above the bound or estimate", ("model",)
        )
        self.count_mismatches = counter(
            "router_count_exact_mismatches", "Prompts counted exactly that the engine counted otherwise", ("model",)
        )
        self.count_given_up = counter(
            "router_count_given_up", "Exact counts that were needed and not had", ("model", "reason")
        )
        self.duration = histogram("router_request_duration_seconds", "Arrival to last byte", ("model", "class"))
        self.ttft = histogram(
            "router_time_to_first_token_seconds", "Arrival to first generated token", ("model", "class", "pool")
        )
        self.queue_wait = histogram("router_queue_wait_seconds", "Wait in the batch queue", ("model",))
        self.hold_wait = histogram("router_hold_wait_seconds", "Wait of chat requests for a place", ("model",))
        self.overhead = histogram(
            "router_overhead_seconds",
            "Arrival to first sending, waits left out: what the router itself costs",
            ("model",),
        )
        self.prompt_tokens = self._histogram(
            "router_prompt_tokens", "Prompt tokens per request", ("model", "class"), buckets=TOKENS_BUCKETS
        )
        self.tokens = counter("router_tokens", "Tokens that engines and relays reported", ("model", "tenant", "kind"))

    def _flow_series(self) -> None:
        counter = self._counter
        self.attempts = counter(
            "router_attempts", "Tries on engines and relays by result", ("model", "target", "result")
        )
        self.borrowed = counter("router_borrowed", "Chat requests that ran in the batch pool", ("model",))
        self.relayed = counter("router_relayed", "Requests sent to a relay, by why", ("model", "relay", "cause"))
        self.queue_refusals = counter("router_queue_refusals", "Batch requests not queued", ("model", "reason"))
        self.loop_stops = counter("router_relay_loops", "Requests refused because they came round", ())

    def _state_series(self) -> None:
        gauge = self._gauge
        by_engine, by_class = ("model", "engine"), ("model", "engine", "class")
        self.engine_up = gauge("router_engine_up", "1 while the engine serves", by_engine, "livemin")
        self.capacity = gauge("router_ledger_capacity_tokens", "KV tokens to commit", by_engine, "livesum")
        self.reserve = gauge("router_ledger_chat_reserve_tokens", "KV tokens kept for chat", by_engine, "livesum")
        self.committed = gauge("router_ledger_committed_tokens", "KV tokens committed", by_class, "livesum")
        self.seats = gauge("router_ledger_seats", "Sequences running by our account", by_class, "livesum")
        self.in_prefill = gauge("router_ledger_in_prefill_requests", "Before their first token", by_class, "livesum")
        self.held = gauge("router_held_requests", "Chat requests held for a place", ("model",), "livesum")
        self.queued = gauge("router_queue_requests", "Batch requests waiting", ("model",), "livemax")
        self.queued_tokens = gauge("router_queue_tokens", "KV tokens waiting", ("model",), "livemax")
        self.queue_age = gauge("router_queue_oldest_age_seconds", "Age of the oldest waiting", ("model",), "livemax")
        self.queue_up = gauge("router_queue_up", "1 while the queue's store answers", ("model",), "livemin")
        self.buffered = gauge("router_buffered_bytes", "Request bodies in memory", (), "livesum")
        self.relay_open = gauge("router_relay_breaker_open", "1 while a relay is not tried", ("relay",), "livemax")

    # -- writing ------------------------------------------------------------------------------------------------

    def arrived(self) -> None:
        """One more request has reached a route."""
        self.arrivals.inc()

    def finish(self, record: RequestRecord) -> None:
        """Write the one set of request series of a finished request."""
        assert record.outcome is not None, "a request ends in one outcome"
        request_class = record.request_class.value if record.request_class else "none"
        target = "relay" if record.relay else "engine" if record.engine else "none"
        self.requests.labels(
            record.endpoint, record.model, request_class, record.pool, target, record.outcome.value
        ).inc()
        if record.count is not None:
            self.counted.labels(record.model, record.count.method).inc()
            self.prompt_tokens.labels(record.model, request_class).observe(record.count.prompt_tokens)
        if record.request_class is not None:
            self.classified.labels(record.model, request_class, record.reason.partition(",")[0]).inc()
        if record.ended_at_s is not None:
            self.duration.labels(record.model, request_class).observe(record.ended_at_s - record.arrived_at_s)
        if record.first_token_at_s is not None:
            ttft_s = record.first_token_at_s - record.arrived_at_s
            self.ttft.labels(record.model, request_class, record.pool).observe(ttft_s)
        if record.overhead_s is not None:
            self.overhead.labels(record.model).observe(record.overhead_s)
        if record.request_class is RequestClass.BATCH and record.queue_wait_s > 0:
            self.queue_wait.labels(record.model).observe(record.queue_wait_s)
        if record.request_class is RequestClass.CHAT and record.hold_wait_s > 0:
            self.hold_wait.labels(record.model).observe(record.hold_wait_s)
        if record.prompt_tokens_used is not None:
            self.tokens.labels(record.model, record.tenant, "prompt").inc(record.prompt_tokens_used)
        if record.completion_tokens_used is not None:
            self.tokens.labels(record.model, record.tenant, "completion").inc(record.completion_tokens_used)

    def show_admission(self, model: str, snapshot: AdmissionSnapshot) -> None:
        """Set the gauges of a model's ledger."""
        self.held.labels(model).set(snapshot.held_requests)
        for engine, ledger in snapshot.engines.items():
            self._show_ledger(model, engine, ledger)

    def show_queue(self, model: str, *, requests: int, tokens: int, oldest_age_s: float, is_up: bool) -> None:
        """Set the gauges of a model's batch queue, which all processes share."""
        self.queued.labels(model).set(requests)
        self.queued_tokens.labels(model).set(tokens)
        self.queue_age.labels(model).set(oldest_age_s)
        self.queue_up.labels(model).set(is_up)

    def _show_ledger(self, model: str, engine: str, ledger: LedgerSnapshot) -> None:
        self.capacity.labels(model, engine).set(ledger.capacity_tokens)
        self.reserve.labels(model, engine).set(ledger.chat_reserve_tokens)
        for request_class, held in ledger.held.items():
            self.committed.labels(model, engine, request_class.value).set(held.tokens)
            self.seats.labels(model, engine, request_class.value).set(held.seats)
            self.in_prefill.labels(model, engine, request_class.value).set(held.in_prefill)

    # -- reading ------------------------------------------------------------------------------------------------

    def page(self) -> bytes:
        """The exposition text; with a shared directory, of all processes together."""
        if self._shared_dir is None:
            return generate_latest(self._registry)
        together = CollectorRegistry()
        together.register(_AllProcesses(self._shared_dir))
        return generate_latest(together)

    # -- making -------------------------------------------------------------------------------------------------

    def _counter(self, name: str, text: str, labels: Iterable[str]) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, labels: Iterable[str], mode: GaugeMode) -> Gauge:
        return Gauge(name, text, labels, registry=self._registry, multiprocess_mode=mode)

    def _histogram(
        self, name: str, text: str, labels: Iterable[str], *, buckets: tuple[float, ...] = SECONDS_BUCKETS
    ) -> Histogram:
        return Histogram(name, text, labels, registry=self._registry, buckets=buckets)


class _AllProcesses(Collector):
    """The values of every process's files. One that a process has only just made is empty, and read the next time."""

    def __init__(self, shared_dir: Path) -> None:
        self._shared_dir = shared_dir

    def collect(self) -> Iterable[Metric]:
        files = [str(file) for file in self._shared_dir.glob("*.db") if file.stat().st_size > 0]
        merged: Iterable[Metric] = MultiProcessCollector.merge(files, accumulate=True)  # type: ignore[no-untyped-call]  # no stubs
        return merged


def share_between_processes(slot: int) -> None:
    """Make prometheus-client keep its values in files; call before any `Metrics` is made, once a process.

    Files are named by the worker's slot, not by its process id: a restarted worker goes on with the files of the dead
    one, so counters never fall and the number of files has a bound. Where the files are is said by
    `config.environment.set_shared_metrics_dir`.
    """
    values.ValueClass = values.MultiProcessValue(process_identifier=lambda: slot)  # type: ignore[no-untyped-call]  # no stubs
