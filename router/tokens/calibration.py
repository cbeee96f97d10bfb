"""Bytes per token, learned from what engines report, with an upper quantile.

Per class of request: the running mean and variance of x = ln(bytes / tokens). A text of B bytes is then put at
B * exp(-(mean - z * sd)) tokens, where z starts at the normal 99 % quantile and is steered by the misses themselves,
so that under-estimates settle near `MISS_TARGET_RATIO` whatever the real distribution is. Until a class has seen
`WARM_UPDATES` prompts, all classes together are used; until those have, 2 bytes per token.

Pure: no clock, no tokenizer, no I/O. It never bounds anything: what it says is an estimate.
"""

import math

from router.policy.demand import RequestClass

#: Weight of the newest prompt. About 50 prompts of memory follow a change of traffic, and ride out one odd prompt.
LEARNING_RATE = 0.02
#: Before anything is known. English is near 4; 2 holds for nearly all prose and code, so it errs on the high side.
COLD_BYTES_PER_TOKEN = 2.0
#: Prompts before a class is believed.
WARM_UPDATES = 20
#: Normal quantile of 0.99.
Z_START = 2.33
Z_MIN = 1.0
Z_MAX = 8.0
#: Share of prompts that may turn out longer than estimated.
MISS_TARGET_RATIO = 0.01
#: How far one miss moves z; a hit moves it back by the hundredth part. Source: adaptive conformal inference
#: (Gibbs and Candes, 2021), the update of the working level.
Z_STEP = 0.3
#: x is held inside these, so that a truncated or repeated prompt cannot poison the mean. 1 to 16 bytes per token.
X_MIN = 0.0
X_MAX = math.log(16.0)


class _Learned:
    """Mean, variance and z of one class."""

    __slots__ = ("mean", "updates", "variance", "z")

    def __init__(self) -> None:
        self.updates = 0
        self.mean = 0.0
        self.variance = 0.0
        self.z = Z_START

    @property
    def is_warm(self) -> bool:
        return self.updates >= WARM_UPDATES

    @property
    def safe_x(self) -> float:
        return max(X_MIN, self.mean - self.z * math.sqrt(self.variance))

    def update(self, x: float) -> None:
        """One more prompt. Judged first with what was known before it, then learned."""
        if self.is_warm:
            missed = x < self.safe_x
            self.z = min(Z_MAX, max(Z_MIN, self.z + Z_STEP * (missed - MISS_TARGET_RATIO)))
        self.updates += 1
        # A plain average while there is little to average, so that the first prompt does not weigh for fifty.
        rate = max(LEARNING_RATE, 1.0 / self.updates)
        delta = x - self.mean
        self.mean += rate * delta
        self.variance = (1.0 - rate) * (self.variance + rate * delta * delta)


class BytesPerToken:
    """The learned ratio of one model. Memory is constant: one entry a class."""

    def __init__(self) -> None:
        self._all = _Learned()
        self._classes = {request_class: _Learned() for request_class in RequestClass}

    def learn(self, text_bytes: int, used_tokens: int, request_class: RequestClass | None) -> bool:
        """Take in one prompt of `text_bytes` that the engine counted as `used_tokens`. False if it says nothing."""
        if text_bytes <= 0 or used_tokens <= 0:
            return False
        x = min(X_MAX, max(X_MIN, math.log(text_bytes / used_tokens)))
        self._all.update(x)
        if request_class is not None:
            self._classes[request_class].update(x)
        return True

    def estimate_tokens(self, text_bytes: int, request_class: RequestClass | None) -> int:
        """Tokens that about 99 % of prompts of this size and class do not exceed; at least 1 where there are bytes."""
        if text_bytes <= 0:
            return 0
        return max(1, math.ceil(text_bytes / self.safe_bytes_per_token(request_class)))

    def safe_bytes_per_token(self, request_class: RequestClass | None) -> float:
        """The ratio that estimates use; 2 until there is enough to go by."""
        known = self._known(request_class)
        return COLD_BYTES_PER_TOKEN if known is None else math.exp(known.safe_x)

    def is_warm(self, request_class: RequestClass | None) -> bool:
        """Whether estimates of this class rest on anything learned."""
        return self._known(request_class) is not None

    def _known(self, request_class: RequestClass | None) -> _Learned | None:
        if request_class is not None and self._classes[request_class].is_warm:
            return self._classes[request_class]
        return self._all if self._all.is_warm else None
