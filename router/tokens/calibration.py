"""Bytes per token, learned from what engines report, with an upper quantile.

Per class of request: the running mean and variance of x = ln(bytes / tokens). A text of B bytes is then put at
B * exp(-(mean - z * sd)) tokens, where z starts at the normal 99 % quantile and is steered by the misses themselves,
so that under-estimates settle near `MISS_TARGET_RATIO` whatever the real distribution is. Until a class has seen
`WARM_UPDATES` prompts, all classes together are used; until those have, 2 bytes per token.

Prompts are added up as they come, and change the estimate together, eight at a time; at once while little is known, and
where one turned out longer than estimated.

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
#: Prompts that are added up before the estimate changes, once it is warm.
FOLD_EVERY = 8
#: x is held inside these, so that a truncated or repeated prompt cannot poison the mean. 1 to 16 bytes per token.
X_MIN = 0.0
X_MAX = math.log(16.0)


class _Learned:
    """Mean, variance and z of one class, and what prompts since have added up to, as deviations from that mean."""

    __slots__ = ("bytes_per_token", "mean", "pending", "safe_x", "squares", "sum", "updates", "variance", "z")

    def __init__(self) -> None:
        #: Prompts that are in mean and variance.
        self.updates = 0
        self.mean = 0.0
        self.variance = 0.0
        self.z = Z_START
        #: What estimates go by, as x and as a ratio.
        self.safe_x = 0.0
        self.bytes_per_token = COLD_BYTES_PER_TOKEN
        self.pending = 0
        self.sum = 0.0
        self.squares = 0.0

    def fold(self, *, missed: bool) -> None:
        """Take in what was added up; `missed`: the last of it was longer than estimated."""
        added = self.pending
        if self.updates >= WARM_UPDATES:
            self.z = min(Z_MAX, max(Z_MIN, self.z + Z_STEP * (missed - MISS_TARGET_RATIO * added)))
        self.updates += added
        # A plain average while there is little to average, so that the first prompt does not weigh for fifty.
        rate = max(1.0 - (1.0 - LEARNING_RATE) ** added, added / self.updates)
        step = rate * self.sum / added
        self.variance = max(0.0, (1.0 - rate) * self.variance + rate * self.squares / added - step * step)
        self.mean += step
        self.pending = 0
        self.sum = self.squares = 0.0
        self.safe_x = max(X_MIN, self.mean - self.z * math.sqrt(self.variance))
        self.bytes_per_token = math.exp(self.safe_x)


class BytesPerToken:
    """The learned ratio of one model. Memory is constant: one entry a class.

    `is_warm`: estimates rest on something learned.
    """

    def __init__(self) -> None:
        self._all = _Learned()
        self._classes = {request_class: _Learned() for request_class in RequestClass}
        #: What estimates go by, by class; None is for a request whose class is not known yet.
        self._known: dict[RequestClass | None, _Learned] = dict.fromkeys((None, *RequestClass), self._all)
        self.is_warm = False

    def learn(self, text_bytes: int, used_tokens: int, request_class: RequestClass | None) -> bool:
        """Take in one prompt of `text_bytes` that the engine counted as `used_tokens`. False if it says nothing."""
        if text_bytes <= 0 or used_tokens <= 0:
            return False
        x = min(X_MAX, max(X_MIN, math.log(text_bytes / used_tokens)))
        both = (self._all,) if request_class is None else (self._all, self._classes[request_class])
        for learned in both:
            beyond = x - learned.mean
            learned.sum += beyond
            learned.squares += beyond * beyond
            learned.pending += 1
            # What is not warm yet folds each time, and nothing is a miss to it.
            if x < learned.safe_x or learned.pending >= FOLD_EVERY or learned.updates < WARM_UPDATES:
                learned.fold(missed=x < learned.safe_x)
                if learned.updates == WARM_UPDATES:
                    self._believe(learned)
        return True

    def estimate_tokens(self, text_bytes: int, request_class: RequestClass | None) -> int:
        """Tokens that about 99 % of prompts of this size and class do not exceed; at least 1 where there are bytes."""
        if text_bytes <= 0:
            return 0
        known = self._known[request_class]
        ratio = known.bytes_per_token if self.is_warm else COLD_BYTES_PER_TOKEN
        return max(1, math.ceil(text_bytes / ratio))

    def _believe(self, learned: _Learned) -> None:
        """Enough was seen of all classes, or of one."""
        if learned is self._all:
            self.is_warm = True
        for request_class, own in self._classes.items():
            if own is learned:
                self._known[request_class] = own
