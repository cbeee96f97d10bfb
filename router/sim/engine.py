"""vLLM's V1 scheduler and its step time as a pure, discrete model: one `step` is one forward pass.

Rules, as `vllm/v1/core/sched/scheduler.py` keeps them:
1. A step has a budget of `max_num_batched_tokens`. Running sequences take it first, in the order they were admitted,
   decodes and prefill chunks alike; then waiting ones, while there are seats, budget, and nothing was preempted.
2. `long_prefill_token_threshold` caps the chunk of any sequence that is not alone.
3. KV blocks are taken chunk by chunk. With `scheduler_reserve_full_isl` a waiting sequence is admitted only if its
   whole prompt fits the blocks that are free now; a head that does not fit blocks all behind it.
4. A running sequence that gets no block preempts the last admitted (fcfs) or the worst (priority, then arrival). The
   victim loses its KV, computes prompt and output again, and waits at its own place.
5. `max_num_queued_reqs` counts running and waiting.

Not modelled: the prefix cache (`_cached_prefix_tokens` is its place), speculative decoding, LoRA, asynchronous
scheduling, the CPU work around a step. It knows no clock, no HTTP and no tokenizer: time is given, text does not exist.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal

from router.sim.presets import EnginePreset

FinishReason = Literal["stop", "length"]


class EngineBusy(Exception):
    """`max_num_queued_reqs` is reached: vLLM answers 503."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """How the engine is started. Names and meanings are vLLM's flags; sizes are tokens but for the counts.

    `kv_cache_tokens` None takes the preset's. One block of it is the null block and holds nothing.
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    kv_cache_tokens: int | None = None
    block_size: int = 16
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True
    max_num_queued_reqs: int | None = None


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One sequence. It ends after `output_tokens` ("stop"), or after `max_tokens` where that comes first or together
    ("length"). `max_tokens` 0 is a pooling request: it ends with its prefill. Lower `priority` is earlier."""

    id: str
    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A sequence has `output_tokens` tokens now (0 for pooling). `finish_reason` is set on its last event."""

    id: str
    output_tokens: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One forward pass. The events happen at its end, `duration_s` after its start; 0.0 and none when idle."""

    duration_s: float
    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What the engine holds and has done so far. Totals only grow. `finished` counts by reason."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_usable: int
    prompt_tokens_total: int
    generation_tokens_total: int
    preemptions_total: int
    rejected_total: int
    aborted_total: int
    steps_total: int
    finished: dict[str, int]

    @property
    def kv_usage_ratio(self) -> float:
        """0 to 1, as `vllm:kv_cache_usage_perc`."""
        return self.kv_blocks_used / self.kv_blocks_usable


class _Sequence:
    """A request inside the engine. `chunk_tokens` is what the planned step computes of it."""

    __slots__ = ("blocks", "chunk_tokens", "computed_tokens", "key", "output_tokens", "request")

    def __init__(self, request: SimRequest, key: tuple[int, float, int]) -> None:
        self.request = request
        self.key = key
        self.computed_tokens = 0
        self.output_tokens = 0
        self.blocks = 0
        self.chunk_tokens = 0

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.output_tokens


def _key(sequence: _Sequence) -> tuple[int, float, int]:
    return sequence.key


class SimEngine:
    """One engine. `step` plans and finishes a pass at once, for virtual time; a driver in real time calls `plan_step`,
    waits, and calls `finish_step`, so that an abort in between is seen.

    Raises: `ValueError` for a KV cache that cannot hold one sequence of `max_model_len`, as vLLM refuses to start.
    """

    def __init__(self, preset: EnginePreset, shape: EngineShape) -> None:
        self.preset = preset
        self.shape = shape
        self.num_gpu_blocks = (shape.kv_cache_tokens or preset.kv_cache_tokens) // shape.block_size
        usable = self.num_gpu_blocks - 1
        if usable < self._blocks_for(shape.max_model_len):
            raise ValueError(
                f"a KV cache of {self.num_gpu_blocks * shape.block_size} tokens cannot hold one sequence of "
                f"max_model_len {shape.max_model_len} beside the null block"
            )
        self._usable_blocks = usable
        self._free_blocks = usable
        self._running: list[_Sequence] = []
        #: Ordered by key. Under fcfs the key is the arrival, so a preempted sequence is again ahead of all that wait.
        self._waiting: list[_Sequence] = []
        self._by_id: dict[str, _Sequence] = {}
        self._planned: list[_Sequence] = []
        self._submitted = 0
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._preemptions_total = 0
        self._rejected_total = 0
        self._aborted_total = 0
        self._steps_total = 0
        self._finished: dict[str, int] = {"stop": 0, "length": 0}

    @property
    def kv_cache_size_tokens(self) -> int:
        """As vLLM reports it: the sequences of `max_model_len` that all blocks hold, times that length."""
        longest = self.shape.max_model_len
        return int(self.num_gpu_blocks / self._blocks_for(longest) * longest)

    @property
    def is_idle(self) -> bool:
        return not self._by_id

    def check_admission(self, sequences: int = 1) -> None:
        """Raise `EngineBusy` where `sequences` more do not fit `max_num_queued_reqs`; counts the refusal."""
        limit = self.shape.max_num_queued_reqs
        if limit is not None and len(self._by_id) + sequences > limit:
            self._rejected_total += 1
            raise EngineBusy(f"{len(self._by_id)} requests of at most {limit}")

    def submit(self, request: SimRequest, now_s: float) -> None:
        """Queue one sequence.

        Raises: `EngineBusy`; `ValueError` for an id in use, or lengths that no vLLM would let through.
        """
        if request.id in self._by_id:
            raise ValueError(f"request id {request.id!r} is in use")
        if (
            request.prompt_tokens < 1
            or request.max_tokens < 0
            or (request.max_tokens > 0) != (request.output_tokens > 0)
        ):
            raise ValueError(
                f"request {request.id!r} needs a prompt, and an output exactly where max_tokens allows one"
            )
        if request.prompt_tokens + request.max_tokens > self.shape.max_model_len:
            raise ValueError(
                f"{request.prompt_tokens} + {request.max_tokens} tokens exceed max_model_len {self.shape.max_model_len}"
            )
        self.check_admission()
        self._submitted += 1
        priority = request.priority if self.shape.scheduling_policy == "priority" else 0
        sequence = _Sequence(request, (priority, now_s, self._submitted))
        self._by_id[request.id] = sequence
        insort(self._waiting, sequence, key=_key)

    def abort(self, request_id: str, now_s: float) -> bool:  # noqa: ARG002  the moment is part of the contract: a fuller model frees late
        """Forget a sequence and free its blocks at once; False if it is not here (any more)."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return False
        self._aborted_total += 1
        if not self._drop_waiting(sequence):
            self._running.remove(sequence)
            if sequence.chunk_tokens:
                self._planned.remove(sequence)
        self._free(sequence)
        return True

    def step(self, now_s: float) -> StepResult:
        """One whole forward pass that starts at `now_s`."""
        duration_s = self.plan_step(now_s)
        if duration_s is None:
            return StepResult(0.0, ())
        return StepResult(duration_s, self.finish_step())

    def plan_step(self, now_s: float) -> float | None:  # noqa: ARG002  the moment is part of the contract: policies that age need it
        """Decide what the next pass computes; its length in seconds, or None when there is nothing to do."""
        assert not self._planned, "the planned step was not finished"
        if not self._by_id:
            return None
        budget_tokens, preempted = self._plan_running(self.shape.max_num_batched_tokens)
        if not preempted:
            self._plan_waiting(budget_tokens)
        assert self._planned, "an engine with requests always has something to compute"
        self._steps_total += 1
        return self._planned_s()

    def finish_step(self) -> tuple[TokenEvent, ...]:
        """Apply the planned pass; the tokens it yields, in scheduling order."""
        events: list[TokenEvent] = []
        for sequence in self._planned:
            sequence.computed_tokens += sequence.chunk_tokens
            sequence.chunk_tokens = 0
            if sequence.computed_tokens == sequence.tokens:
                events.append(self._sample(sequence))
        self._planned = []
        return tuple(events)

    def snapshot(self) -> EngineSnapshot:
        """A frozen copy for gauges and tests."""
        return EngineSnapshot(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_used=self._usable_blocks - self._free_blocks,
            kv_blocks_usable=self._usable_blocks,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            preemptions_total=self._preemptions_total,
            rejected_total=self._rejected_total,
            aborted_total=self._aborted_total,
            steps_total=self._steps_total,
            finished=dict(self._finished),
        )

    def _plan_running(self, budget_tokens: int) -> tuple[int, bool]:
        """Rules 1, 2 and 4. Returns the budget left and whether anything was preempted."""
        preempted = False
        position = 0
        while position < len(self._running) and budget_tokens > 0:
            sequence = self._running[position]
            chunk_tokens = self._chunk_tokens(sequence, budget_tokens)
            while not self._allocate(sequence, chunk_tokens):
                victim_position = self._victim_position()
                victim = self._running[victim_position]
                budget_tokens += self._preempt(victim)
                preempted = True
                if victim is sequence:
                    return budget_tokens, preempted
                if victim_position < position:
                    position -= 1
            sequence.chunk_tokens = chunk_tokens
            self._planned.append(sequence)
            budget_tokens -= chunk_tokens
            position += 1
        return budget_tokens, preempted

    def _plan_waiting(self, budget_tokens: int) -> None:
        """Rules 1 to 3."""
        while self._waiting and budget_tokens > 0 and len(self._running) < self.shape.max_num_seqs:
            sequence = self._waiting[0]
            if self.shape.scheduler_reserve_full_isl and self._blocks_for(sequence.tokens) > self._free_blocks:
                return
            sequence.computed_tokens = self._cached_prefix_tokens(sequence)
            chunk_tokens = self._chunk_tokens(sequence, budget_tokens)
            if not self._allocate(sequence, chunk_tokens):
                return
            del self._waiting[0]
            self._running.append(sequence)
            sequence.chunk_tokens = chunk_tokens
            self._planned.append(sequence)
            budget_tokens -= chunk_tokens

    def _chunk_tokens(self, sequence: _Sequence, budget_tokens: int) -> int:
        chunk_tokens = sequence.tokens - sequence.computed_tokens
        threshold = self.shape.long_prefill_token_threshold
        if 0 < threshold < chunk_tokens and len(self._by_id) > 1:
            chunk_tokens = threshold
        return min(chunk_tokens, budget_tokens)

    def _cached_prefix_tokens(self, sequence: _Sequence) -> int:  # noqa: ARG002  the place of a prefix cache: it needs the sequence
        """Tokens of the prompt that need no computing. No prefix cache is modelled: always 0."""
        return 0

    def _victim_position(self) -> int:
        """The last admitted (fcfs), or the worst by priority and arrival."""
        last = len(self._running) - 1
        if self.shape.scheduling_policy == "fcfs":
            return last
        return max(range(last + 1), key=lambda position: self._running[position].key)

    def _preempt(self, victim: _Sequence) -> int:
        """Send a running sequence back to wait with nothing computed; returns the budget it had in this step."""
        self._running.remove(victim)
        returned_tokens = victim.chunk_tokens
        if returned_tokens:
            self._planned.remove(victim)
            victim.chunk_tokens = 0
        self._free(victim)
        victim.computed_tokens = 0
        insort(self._waiting, victim, key=_key)
        self._preemptions_total += 1
        return returned_tokens

    def _planned_s(self) -> float:
        prefill_tokens = decode_tokens = context_tokens = 0
        attention_pairs = 0.0
        for sequence in self._planned:
            chunk_tokens, context = sequence.chunk_tokens, sequence.computed_tokens
            if chunk_tokens == 1 and sequence.output_tokens > 0:
                decode_tokens += 1
                context_tokens += context + 1
            else:
                prefill_tokens += chunk_tokens
                attention_pairs += chunk_tokens * (context + chunk_tokens / 2)
        return self.preset.step_s(prefill_tokens, decode_tokens, context_tokens, attention_pairs, len(self._planned))

    def _sample(self, sequence: _Sequence) -> TokenEvent:
        request = sequence.request
        if request.max_tokens > 0:
            sequence.output_tokens += 1
            self._generation_tokens_total += 1
        if sequence.output_tokens <= 1:
            self._prompt_tokens_total += request.prompt_tokens
        reason: FinishReason | None = None
        if request.max_tokens == 0 or request.max_tokens > sequence.output_tokens == request.output_tokens:
            reason = "stop"
        elif sequence.output_tokens == request.max_tokens:
            reason = "length"
        if reason is not None:
            self._finished[reason] += 1
            self._running.remove(sequence)
            del self._by_id[request.id]
            self._free(sequence)
        return TokenEvent(request.id, sequence.output_tokens, reason)

    def _drop_waiting(self, sequence: _Sequence) -> bool:
        position = bisect_left(self._waiting, sequence.key, key=_key)
        if position < len(self._waiting) and self._waiting[position] is sequence:
            del self._waiting[position]
            return True
        return False

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.shape.block_size)

    def _allocate(self, sequence: _Sequence, chunk_tokens: int) -> bool:
        """Give it the blocks for its next chunk, all or none."""
        missing = self._blocks_for(sequence.computed_tokens + chunk_tokens) - sequence.blocks
        if missing > self._free_blocks:
            return False
        sequence.blocks += missing
        self._free_blocks -= missing
        return True

    def _free(self, sequence: _Sequence) -> None:
        self._free_blocks += sequence.blocks
        sequence.blocks = 0
