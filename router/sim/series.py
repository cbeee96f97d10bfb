"""`/metrics` of the simulated engine: the `vllm:` series that a router reads, computed when asked.

Names, labels and version cut-overs are vLLM's. Histograms other than these two are absent.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from router.sim.engine import SimEngine
from router.sim.options import SimServerOptions

#: Source: vLLM `v1/metrics/buckets.py`, seconds.
_TTFT_BUCKETS_S: tuple[float, ...] = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_E2E_BUCKETS_S: tuple[float, ...] = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0),
    *(20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

_REASONS = ("stop", "length", "abort", "error", "repetition")


class EngineSeries:
    """A registry of its own for one engine; collected on each scrape."""

    def __init__(self, engine: SimEngine, options: SimServerOptions) -> None:
        self._engine = engine
        self._options = options
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._ttft_s = self._histogram("vllm:time_to_first_token_seconds", "Time to first token.", _TTFT_BUCKETS_S)
        self._e2e_s = self._histogram("vllm:e2e_request_latency_seconds", "End-to-end latency.", _E2E_BUCKETS_S)

    def observe_first_token(self, elapsed_s: float) -> None:
        self._ttft_s.labels("0", self._options.model).observe(elapsed_s)

    def observe_end(self, elapsed_s: float) -> None:
        self._e2e_s.labels("0", self._options.model).observe(elapsed_s)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        now = self._engine.snapshot()
        yield self._gauge("vllm:num_requests_running", "Requests in execution batches.", now.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to be processed.", now.waiting)
        if self._options.is_at_least("0.20"):
            name = "vllm:num_requests_waiting_by_reason"
            by_reason = GaugeMetricFamily(
                name, "Waiting requests by reason.", labels=("engine", "model_name", "reason")
            )
            by_reason.add_metric(("0", self._options.model, "capacity"), now.waiting)
            by_reason.add_metric(("0", self._options.model, "deferred"), 0)
            yield by_reason
        yield self._gauge("vllm:kv_cache_usage_perc", "KV-cache usage, 1 is full.", now.kv_usage_ratio)
        yield self._counter("vllm:num_preemptions", "Preemptions so far.", now.preemptions_total)
        yield self._counter("vllm:prompt_tokens", "Prefill tokens processed.", now.prompt_tokens_total)
        yield self._counter("vllm:generation_tokens", "Generation tokens processed.", now.generation_tokens_total)
        labels = ("engine", "finished_reason", "model_name")
        success = CounterMetricFamily("vllm:request_success", "Requests by finish reason.", labels=labels)
        for reason in _REASONS:
            # vLLM's counter stays 0 for aborts after a client left; so does this one.
            success.add_metric(("0", reason, self._options.model), now.finished.get(reason, 0))
        yield success
        if self._options.is_at_least("0.32"):
            text = "Admission attempts rejected by a queue limit."
            rejections = CounterMetricFamily("vllm:admission_rejections", text, labels=("model_name", "reason"))
            rejections.add_metric((self._options.model, "max_num_queued_reqs"), now.rejected_total)
            rejections.add_metric((self._options.model, "max_num_queued_tokens"), 0)
            yield rejections
        yield self._cache_config()

    def _cache_config(self) -> Metric:
        engine = self._engine
        values = {
            "block_size": str(engine.shape.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": "False",
            "engine": "0",
            "gpu_memory_utilization": "0.92",
            "num_gpu_blocks": str(engine.num_gpu_blocks),
        }
        if self._options.is_at_least("0.26"):
            values["kv_cache_size_tokens"] = str(engine.kv_cache_size_tokens)
            values["kv_cache_max_concurrency"] = str(engine.kv_cache_size_tokens / engine.shape.max_model_len)
        info = GaugeMetricFamily("vllm:cache_config_info", "The engine's CacheConfig.", labels=tuple(values))
        info.add_metric(tuple(values.values()), 1)
        return info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("engine", "model_name"))
        family.add_metric(("0", self._options.model), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("engine", "model_name"))
        family.add_metric(("0", self._options.model), value)
        return family

    def _histogram(self, name: str, text: str, buckets_s: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("engine", "model_name"), buckets=buckets_s, registry=self.registry)
