"""What one simulated server holds: engine, its task, log, faults, series, the counters behind repeatable answers."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping

from router.clock import Clock
from router.request import Endpoint
from router.sim.answers import Stamp
from router.sim.calls import Call
from router.sim.engine import SimEngine, SimRequest
from router.sim.faults import FaultBoard, Faults
from router.sim.log import RequestLog
from router.sim.options import SimServerOptions
from router.sim.pacing import EngineTask, Generation
from router.sim.series import EngineSeries

_ID_PREFIXES = {
    Endpoint.CHAT: "chatcmpl-",
    Endpoint.MESSAGES: "chatcmpl-",
    Endpoint.COMPLETIONS: "cmpl-",
    Endpoint.RESPONSES: "resp_",
    Endpoint.EMBEDDINGS: "embd-",
}


class SimState:
    """Shared by the routes of one app. Whoever starts `task` closes it."""

    def __init__(self, options: SimServerOptions, clock: Clock) -> None:
        self.options = options
        self.clock = clock
        self.engine = SimEngine(options.preset, options.shape)
        self.task = EngineTask(self.engine, clock, options.time_scale)
        self.log = RequestLog(options.log_entries_max, options.log_body_max_bytes)
        self.board = FaultBoard(options.faults, options.seed)
        self.series = EngineSeries(self.engine, options)
        #: Set when the server ends, for whoever only waits.
        self.closing = asyncio.Event()
        self.in_flight = 0
        self.created_unix_s = int(clock.unix_s())
        #: What else must happen when faults change: the sockets' owner sets this.
        self.on_faults: Callable[[Faults], Awaitable[None]] | None = None
        self._calls = 0
        self._random = random.Random(options.seed)  # noqa: S311  repeatable draws, no secret

    async def set_faults(self, faults: Faults) -> None:
        """Put faults in force instead of those before; an empty `Faults` heals everything."""
        self.board.set(faults)
        if self.on_faults is not None:
            await self.on_faults(faults)

    def is_authorized(self, headers: Mapping[str, str]) -> bool:
        """Whether the request has the server's key: as a bearer, or as `x-api-key` where a provider takes that."""
        key = self.options.api_key
        if key is None or headers.get("authorization") == f"Bearer {key}":
            return True
        return self.options.face == "provider" and headers.get("x-api-key") == key

    def stamp(self, call: Call) -> Stamp:
        """A new answer's identity; the client's request id where it has one."""
        self._calls += 1
        base = call.request_id or f"{self._random.getrandbits(64):016x}"
        item_id = f"msg_{self._random.getrandbits(64):016x}"
        return Stamp(f"{_ID_PREFIXES[call.endpoint]}{base}", item_id, int(self.clock.unix_s()))

    def generation(self, call: Call) -> Generation:
        """Submit the call's sequences. Raises: `EngineBusy`."""
        return Generation(self.task, tuple(self._sequence(call, index) for index in range(call.sequences)))

    def word(self, index: int, token: int) -> str:
        """The text of one output token; neighbours differ."""
        return self.options.tokenizer.word(self.options.seed + 131 * index + 17 * token)

    def _sequence(self, call: Call, index: int) -> SimRequest:
        prompt_index = index // call.n
        limit_tokens = call.limits_tokens[prompt_index]
        output_tokens = limit_tokens
        lengths = self.options.output_lengths
        may_stop = call.max_tokens is None or lengths.under_caps
        if limit_tokens and may_stop and not call.ignore_eos:
            output_tokens = lengths.draw(self._random)
        return SimRequest(
            # The counter, not the client's id, keeps two calls apart.
            id=f"{self._calls}-{index}",
            prompt_tokens=max(1, call.prompts[prompt_index].tokens),
            max_tokens=limit_tokens,
            output_tokens=output_tokens,
            priority=call.priority,
        )
