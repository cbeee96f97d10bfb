"""Whom a request can be sent to, and what is the same for all that are: made once for each engine and relay."""

from collections.abc import Callable

import msgspec

from router.clock import Clock
from router.upstream.api import Upstream


class Target(msgspec.Struct, frozen=True):
    """`name` is for errors. After `commit_after_s` the headers of a stream go out, with a first token or without.
    `on_output` is told of the first generated token of an answer, `on_cut` when the upstream fails amid it."""

    name: str
    upstream: Upstream
    clock: Clock
    commit_after_s: float
    on_output: Callable[[], None] | None
    on_cut: Callable[[], None] | None
