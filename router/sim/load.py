"""Sends a planned load over HTTP and writes down what came back: open loop, so a slow server cannot slow the load.

Rules: each request is sent at its intended time whatever the earlier ones do, and latency counts from that time;
everything is bounded (requests in flight, time of one request, time after the last arrival); every arrival ends in
exactly one `RequestResult`, also when the run is stopped. It must never know what is being measured, or why.
"""

import asyncio
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx
import msgspec

from router.clock import Clock, SystemClock
from router.policy.demand import RequestClass
from router.sim.reader import REASON_MAX_CHARS, AnswerReader, Ending, error_reason, http_ending
from router.sim.workload import PlannedRequest, prompt_text

#: Bytes read of a refusal's body: enough for its message.
_REFUSAL_MAX_BYTES = 64 * 1024
#: Characters kept of one router header.
_LABEL_MAX_CHARS = 64


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Where the load goes and what bounds it.

    `base_url` is the server's root, with or without `/v1`. `in_flight_max`: a request that would exceed it is not sent
    and ends as `client_limit`. `request_timeout_s` bounds one request, `drain_s` the wait after the last arrival.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    in_flight_max: int = 1_000
    request_timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    drain_s: float = 600.0
    ignore_eos: bool = False

    @property
    def chat_url(self) -> str:
        """The full URL that requests are posted to."""
        return self.base_url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class RouterHeaders:
    """What the router said about one answer, in its headers. Everything but `request_id` is None where there is no
    router."""

    request_id: str | None = None

    pool: str | None = None
    engine: str | None = None
    relay: str | None = None
    reason: str | None = None
    queue_wait_ms: float | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What became of one request. Times are seconds from the start of the run.

    `sent_at_s` is None where it was never sent, the content times where no content came. `ending` is an `Ending` or
    `http_<status>`, `reason` says more. Tokens are the server's `usage`, None where it gave none. `gaps_s`: times
    between content chunks, the first 4,096 of them.
    """

    index: int
    request_class: RequestClass
    planned_tokens: int
    intended_at_s: float
    ended_at_s: float
    ending: str
    reason: str = ""
    status: int | None = None
    sent_at_s: float | None = None
    first_content_at_s: float | None = None
    last_content_at_s: float | None = None
    content_chunks: int = 0
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    router: RouterHeaders = field(default_factory=RouterHeaders)

    @property
    def is_completed(self) -> bool:
        return self.ending == Ending.COMPLETED

    @property
    def is_failed(self) -> bool:
        """Neither served nor stopped by the user."""
        return self.ending not in (Ending.COMPLETED, Ending.INTERRUPTED)


class Load:
    """One run of a load. `results`, `arrived` and `in_flight` may be read while it runs.

    Owns its HTTP client and its tasks; both are gone when `run` returns or raises.
    """

    def __init__(self, options: LoadOptions, clock: Clock | None = None) -> None:
        self._options = options
        self._clock = clock or SystemClock()
        self._started_at_s = 0.0
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut = (Ending.INTERRUPTED, "the run was stopped")
        self.results: list[RequestResult] = []
        self.arrived = dict.fromkeys(RequestClass, 0)
        self.in_flight = dict.fromkeys(RequestClass, 0)
        self.in_flight_peak = 0
        #: Seconds from the start to the end of the last request; 0 until then.
        self.duration_s = 0.0

    def stop(self) -> None:
        """Send nothing more and end what is in flight as interrupted; `run` then returns. Idempotent."""
        self._stopping.set()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock.now_s() - self._started_at_s

    async def run(self, plan: Iterable[PlannedRequest]) -> None:
        """Send the whole plan and wait until each of its requests has ended. Call it once."""
        options = self._options
        limits = httpx.Limits(max_connections=options.in_flight_max, max_keepalive_connections=options.in_flight_max)
        timeout = httpx.Timeout(None, connect=options.connect_timeout_s)
        headers = {"content-type": "application/json", "accept": "text/event-stream", "accept-encoding": "identity"}
        if options.api_key is not None:
            headers["authorization"] = f"Bearer {options.api_key}"
        # The environment's proxies stay out: a load through a proxy measures the proxy.
        async with (
            httpx.AsyncClient(limits=limits, timeout=timeout, headers=headers, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            # Only now: making a client takes tens of milliseconds that are no server's fault.
            self._started_at_s = self._clock.now_s()
            stopper = group.create_task(self._stopping.wait())
            await self._send_all(plan, client, group, stopper)
            await self._drain(group, stopper)
            for task in self._tasks:
                task.cancel()
            stopper.cancel()
        self.duration_s = self.elapsed_s()

    async def _send_all(
        self,
        plan: Iterable[PlannedRequest],
        client: httpx.AsyncClient,
        group: asyncio.TaskGroup,
        stopper: "asyncio.Task[bool]",
    ) -> None:
        for planned in plan:
            body = self._body(planned)
            delay_s = planned.intended_at_s - self.elapsed_s()
            if delay_s > 0:
                await asyncio.wait({stopper}, timeout=delay_s)
            else:
                # Behind time: the requests already under way still get their turn.
                await asyncio.sleep(0)
            if self._stopping.is_set():
                return
            self.arrived[planned.request_class] += 1
            if len(self._tasks) >= self._options.in_flight_max:
                limit = f"{self._options.in_flight_max} requests were in flight"
                self._end(_Exchange(planned), Ending.CLIENT_LIMIT, limit)
                continue
            self._start(_Exchange(planned, sent_at_s=self.elapsed_s()), body, client, group)

    def _start(self, exchange: "_Exchange", body: bytes, client: httpx.AsyncClient, group: asyncio.TaskGroup) -> None:
        """Put one request on its way. Its result is written when its task is done, even one that never ran."""
        task = group.create_task(self._one(exchange, body, client))
        self._tasks.add(task)
        self.in_flight[exchange.planned.request_class] += 1
        self.in_flight_peak = max(self.in_flight_peak, len(self._tasks))

        def finish(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            self.in_flight[exchange.planned.request_class] -= 1
            ending, reason = exchange.ended or self._cut
            self._end(exchange, ending, reason)
            if not self._tasks:
                self._idle.set()

        task.add_done_callback(finish)

    async def _drain(self, group: asyncio.TaskGroup, stopper: "asyncio.Task[bool]") -> None:
        """Wait until nothing is in flight, the run is stopped, or the time for it is over."""
        drain_s = self._options.drain_s
        if self._tasks and not self._stopping.is_set():
            self._idle.clear()
            idle = group.create_task(self._idle.wait())
            await asyncio.wait({idle, stopper}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
        if not self._stopping.is_set():
            self._cut = (Ending.TIMEOUT, f"still running {drain_s:g} s after the last arrival")

    def _body(self, planned: PlannedRequest) -> bytes:
        body: dict[str, object] = {
            "model": self._options.model,
            "messages": [{"role": "user", "content": prompt_text(planned)}],
            "max_tokens": planned.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._options.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body)

    async def _one(self, exchange: "_Exchange", body: bytes, client: httpx.AsyncClient) -> None:
        timeout_s = self._options.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                exchange.ended = await self._exchange(exchange, body, client)
        except TimeoutError:
            exchange.ended = Ending.TIMEOUT, f"no end within {timeout_s:g} s"

    async def _exchange(self, exchange: "_Exchange", body: bytes, client: httpx.AsyncClient) -> tuple[str, str]:
        reader = exchange.reader
        try:
            async with client.stream("POST", self._options.chat_url, content=body) as response:
                exchange.status = response.status_code
                exchange.router = _router_headers(response.headers)
                if response.status_code != httpx.codes.OK:
                    return http_ending(response.status_code), await _refusal_reason(response)
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    return Ending.ERROR_IN_STREAM, await _refusal_reason(response) or "not an event stream"
                async for data in response.aiter_raw():
                    reader.feed(data, self.elapsed_s())
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return Ending.CONNECT_FAILED, _described(error)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return reader.ending(broke=_described(error))
        return reader.ending(broke=None)

    def _end(self, exchange: "_Exchange", ending: str, reason: str) -> None:
        planned, reader = exchange.planned, exchange.reader
        self.results.append(
            RequestResult(
                index=planned.index,
                request_class=planned.request_class,
                planned_tokens=planned.prompt_tokens,
                intended_at_s=planned.intended_at_s,
                ended_at_s=self.elapsed_s(),
                ending=str(ending),
                reason=reason,
                status=exchange.status,
                sent_at_s=exchange.sent_at_s,
                first_content_at_s=reader.first_content_at_s,
                last_content_at_s=reader.last_content_at_s,
                content_chunks=reader.content_chunks,
                gaps_s=reader.gaps_s,
                prompt_tokens=reader.prompt_tokens,
                completion_tokens=reader.completion_tokens,
                router=exchange.router,
            )
        )


@dataclass(slots=True)
class _Exchange:
    """One request under way: what is known of it so far. `ended` is its outcome and reason, once it has one."""

    planned: PlannedRequest
    sent_at_s: float | None = None
    reader: AnswerReader = field(default_factory=AnswerReader)
    status: int | None = None
    router: RouterHeaders = field(default_factory=RouterHeaders)
    ended: tuple[str, str] | None = None


async def _refusal_reason(response: httpx.Response) -> str:
    """What an answer without a stream says for itself."""
    body = bytearray()
    async for data in response.aiter_raw():
        body += data
        if len(body) > _REFUSAL_MAX_BYTES:
            break
    try:
        return error_reason(msgspec.json.decode(bytes(body)))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip(": ")[:REASON_MAX_CHARS]


def _router_headers(headers: httpx.Headers) -> RouterHeaders:
    wait_ms = _number(headers.get("x-router-queue-wait-ms"))
    prompt_tokens = _number(headers.get("x-router-prompt-tokens"))
    return RouterHeaders(
        request_id=_label(headers.get("x-request-id")),
        pool=_label(headers.get("x-router-pool")),
        engine=_label(headers.get("x-router-engine")),
        relay=_label(headers.get("x-router-relay")),
        reason=_label(headers.get("x-router-reason")),
        queue_wait_ms=wait_ms,
        prompt_tokens=None if prompt_tokens is None else int(prompt_tokens),
    )


def _label(text: str | None) -> str | None:
    return text[:_LABEL_MAX_CHARS] if text else None


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text else None
    except ValueError:
        return None
    return number if number is not None and 0 <= number < 1e12 else None
