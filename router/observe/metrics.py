"""The router's own Prometheus series: all of them, and nowhere else.

Every label has a bound: classes, outcomes and reasons are enums; models, engines, relays and tenants come from the
configuration, and what is not in it is `unknown`. Request series are written once, from the finished `RequestRecord`,
so that arrivals equal the sum of outcomes.

What every request touches is a tally (`observe/tallies.py`): its label sets are resolved once, and counting is an
addition. The rest are prometheus-client's objects.

With several worker processes both live in files of a shared directory, by the worker's slot, and `/metrics` of any
worker adds them up.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Metric,
    generate_latest,
    values,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from router.observe.tallies import Series, Tallies, observe
from router.policy.admission import AdmissionSnapshot
from router.policy.demand import RequestClass
from router.policy.ledger import LedgerSnapshot
from router.request import RequestRecord

CONTENT_TYPE = CONTENT_TYPE_LATEST
UNKNOWN = "unknown"

#: 1 ms to 10 min (a long prefill) in steps of about 2, then up to the longest queue wait.
SECONDS_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 10800, 28800,
)  # fmt: skip
#: 20 us, since a small request takes well below a millisecond, to a slow upload.
OVERHEAD_BUCKETS = (
    0.00002, 0.00005, 0.0001, 0.0002, 0.0005,
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300,
)  # fmt: skip
#: A loop is at ease below 10 ms; above 50 ms its streams stutter.
LOOP_DELAY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
TOKENS_BUCKETS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)

GaugeMode = Literal["livesum", "livemax", "livemin"]

#: How many combinations of labels are kept resolved. All that a configuration makes possible can be more, with many
#: tenants; those beyond are resolved again.
_ENDINGS_MAX = 10_000


class Metrics:
    """All series of one process. `shared_dir`: where worker processes keep theirs, this one in its `slot`; None for a
    single process."""

    def __init__(self, *, shared_dir: Path | None = None, slot: int = 0) -> None:
        self._shared_dir = shared_dir
        self._registry = CollectorRegistry()
        self._tallies = Tallies(shared_dir, slot=slot)
        self._registry.register(self._tallies)
        self._endings: dict[tuple[object, ...], _Ending] = {}
        self._request_series()
        self._flow_series()
        self._state_series()
        self._process_series()

    def _request_series(self) -> None:
        counter = self._tallies.counter
        self.arrivals = counter("router_arrivals", "Requests that reached a route", ())
        self.requests = counter(
            "router_requests",
            "Finished requests by outcome",
            ("endpoint", "model", "class", "pool", "target", "outcome"),
        )
        self.classified = counter("router_classified", "Pool decisions by reason", ("model", "class", "reason"))
        self.counted = counter("router_counted", "Prompts by the way they were counted", ("model", "method"))
        self.duration = self._seconds("router_request_duration_seconds", "Arrival to last byte", ("model", "class"))
        self.ttft = self._seconds(
            "router_time_to_first_token_seconds", "Arrival to first generated token", ("model", "class", "pool")
        )
        self.queue_wait = self._seconds("router_queue_wait_seconds", "Wait in the batch queue", ("model",))
        self.hold_wait = self._seconds("router_hold_wait_seconds", "Wait of chat requests for a place", ("model",))
        self.overhead = self._tallies.histogram(
            "router_overhead_seconds",
            "Arrival to first sending, waits left out: what the router itself costs",
            ("model",),
            OVERHEAD_BUCKETS,
        )
        self.prompt_tokens = self._tallies.histogram(
            "router_prompt_tokens", "Prompt tokens per request", ("model", "class"), TOKENS_BUCKETS
        )
        self.tokens = counter(
            "router_tokens", "Tokens that engines and relays reported, or an estimate", ("model", "tenant", "kind")
        )
        self.attempts = counter(
            "router_attempts", "Tries on engines and relays by result", ("model", "target", "result")
        )
        self.affinity = counter(
            "router_affinity", "Requests by whether they went where their prompt's prefix is", ("model", "result")
        )
        self._arrived = self.arrivals.cells()

    def _flow_series(self) -> None:
        counter = self._counter
        self.count_misses = counter(
            "router_count_misses", "Prompts whose real length was above the bound or estimate", ("model",)
        )
        self.count_mismatches = counter(
            "router_count_exact_mismatches", "Prompts counted exactly that the engine counted otherwise", ("model",)
        )
        self.count_given_up = counter(
            "router_count_given_up", "Exact counts that were needed and not had", ("model", "reason")
        )
        self.borrowed = counter("router_borrowed", "Chat requests that ran in the batch pool", ("model",))
        self.relayed = counter("router_relayed", "Requests sent to a relay, by why", ("model", "relay", "cause"))
        self.queue_refusals = counter("router_queue_refusals", "Batch requests not queued", ("model", "reason"))
        self.loop_stops = counter("router_relay_loops", "Requests refused because they came round", ())

    def _state_series(self) -> None:
        gauge = self._gauge
        by_engine, by_class = ("model", "engine"), ("model", "engine", "class")
        self.in_flight = gauge("router_in_flight_requests", "Requests being worked on", (), "livesum")
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

    def _process_series(self) -> None:
        self.loop_delay = self._tallies.histogram(
            "router_loop_delay_seconds", "How late a timer of every 50 ms rang", (), LOOP_DELAY_BUCKETS
        )
        self._loop_delay = self.loop_delay.cells()
        self.cpu = self._counter("router_process_cpu_seconds", "CPU time of the process", ())
        self.memory = self._gauge("router_process_resident_memory_bytes", "Memory in RAM", (), "livesum")
        self.open_files = self._gauge("router_process_open_fds", "Open files and sockets", (), "livesum")
        self.log_lines_dropped = self._counter("router_log_lines_dropped", "Log lines that stderr had no room for", ())

    # -- writing ------------------------------------------------------------------------------------------------

    def arrived(self) -> None:
        """A request has reached a route, or is refused at the door."""
        self._arrived[0] += 1

    def attempted(self, model: str, target: str, result: str) -> None:
        """One try on an engine or relay is over."""
        self.attempts.inc(model, target, result)

    def finish(self, record: RequestRecord) -> None:
        """Write the one set of request series of a finished request."""
        count = record.count
        key = (
            *(record.endpoint, record.model, record.request_class, record.pool, record.reason, record.outcome),
            *(record.tenant, record.engine is None, record.relay is None, None if count is None else count.method),
        )
        to = self._endings.get(key) or self._resolve(key, record)
        to.requests[0] += 1
        if count is not None:
            to.counted[0] += 1
            observe(to.prompt_tokens, TOKENS_BUCKETS, count.prompt_tokens)
        if record.request_class is not None:
            to.classified[0] += 1
        if record.ended_at_s is not None:
            observe(to.duration, SECONDS_BUCKETS, record.ended_at_s - record.arrived_at_s)
        if record.first_token_at_s is not None:
            observe(to.ttft, SECONDS_BUCKETS, record.first_token_at_s - record.arrived_at_s)
        if record.overhead_s is not None:
            observe(to.overhead, OVERHEAD_BUCKETS, record.overhead_s)
        if record.queue_wait_s > 0 and record.request_class is RequestClass.BATCH:
            observe(to.queue_wait, SECONDS_BUCKETS, record.queue_wait_s)
        if record.hold_wait_s > 0 and record.request_class is RequestClass.CHAT:
            observe(to.hold_wait, SECONDS_BUCKETS, record.hold_wait_s)
        if record.prompt_tokens_used is not None:
            to.tokens_prompt[0] += record.prompt_tokens_used
        if record.completion_tokens_used is not None:
            to.tokens_completion[0] += record.completion_tokens_used
        if record.completion_tokens_estimated is not None:
            self._meter_estimate(record, record.completion_tokens_estimated)

    def _meter_estimate(self, record: RequestRecord, completion_tokens: int) -> None:
        """Seldom: nearly everybody reports usage."""
        prompt_tokens = 0 if record.count is None else record.count.prompt_tokens
        self.tokens.cells(record.model, record.tenant, "prompt_estimated")[0] += prompt_tokens
        self.tokens.cells(record.model, record.tenant, "completion_estimated")[0] += completion_tokens

    def _resolve(self, key: tuple[object, ...], record: RequestRecord) -> "_Ending":
        if len(self._endings) >= _ENDINGS_MAX:
            self._endings.clear()
        ending = self._endings[key] = _Ending(self, record)
        return ending

    def loop_was_late(self, delay_s: float) -> None:
        """The timer that watches the event loop rang, `delay_s` after its time."""
        observe(self._loop_delay, LOOP_DELAY_BUCKETS, delay_s)

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
        together.register(self._tallies)
        together.register(_AllProcesses(self._shared_dir))
        return generate_latest(together)

    # -- making -------------------------------------------------------------------------------------------------

    def _counter(self, name: str, text: str, labels: Iterable[str]) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, labels: Iterable[str], mode: GaugeMode) -> Gauge:
        return Gauge(name, text, labels, registry=self._registry, multiprocess_mode=mode)

    def _seconds(self, name: str, text: str, labels: Iterable[str]) -> Series:
        return self._tallies.histogram(name, text, labels, SECONDS_BUCKETS)


class _Ending:
    """Where requests with one combination of labels are counted."""

    __slots__ = (
        *("requests", "classified", "counted", "prompt_tokens", "duration", "ttft", "overhead"),
        *("queue_wait", "hold_wait", "tokens_prompt", "tokens_completion"),
    )

    def __init__(self, metrics: Metrics, record: RequestRecord) -> None:
        """Raises: `AssertionError` where the request has no outcome: it ends in one."""
        assert record.outcome is not None, "a request ends in one outcome"
        model, tenant, pool = record.model, record.tenant, record.pool
        request_class = record.request_class.value if record.request_class else "none"
        target = "relay" if record.relay else "engine" if record.engine else "none"
        method = record.count.method if record.count else "none"
        self.requests = metrics.requests.cells(
            record.endpoint, model, request_class, pool, target, record.outcome.value
        )
        self.classified = metrics.classified.cells(model, request_class, record.reason.partition(",")[0])
        self.counted = metrics.counted.cells(model, method)
        self.prompt_tokens = metrics.prompt_tokens.cells(model, request_class)
        self.duration = metrics.duration.cells(model, request_class)
        self.ttft = metrics.ttft.cells(model, request_class, pool)
        self.overhead = metrics.overhead.cells(model)
        self.queue_wait = metrics.queue_wait.cells(model)
        self.hold_wait = metrics.hold_wait.cells(model)
        self.tokens_prompt = metrics.tokens.cells(model, tenant, "prompt")
        self.tokens_completion = metrics.tokens.cells(model, tenant, "completion")


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
