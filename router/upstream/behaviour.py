"""What an engine of a given version does, as data.

The version comes from `GET /version` at registration; nothing is inferred from the text of a single error, save the two
texts below that prove a request cannot have started. An unknown version gets the answer that is safe to act on.

Source: vLLM source distributions 0.11.0 to 0.33.0. A release between "absent in A" and "seen in B" counts as absent.
"""

import re
from dataclasses import dataclass

_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?!\d)")

#: Said by an engine that is shutting down, before the request was tokenized.
_SHUT_DOWN_TEXT = "cannot schedule new futures after shutdown"


@dataclass(frozen=True, slots=True)
class EngineBehaviour:
    """The cut-overs that the router acts on.

    `version` is (major, minor, patch), or None where it is unknown.
    """

    version: tuple[int, int, int] | None
    #: Shortens the output silently where prompt + max_tokens exceed the context, instead of answering 400.
    clamps_output: bool
    #: Can be told to answer 503 when its own queue is full.
    has_admission_503: bool
    #: Obeys `X-Vllm-Priority`; `priority` in the body is obeyed by every version that schedules by priority.
    honours_priority_header: bool
    #: Obeys `X-data-parallel-rank`.
    honours_dp_rank_header: bool
    #: States its KV capacity in tokens in `vllm:cache_config_info`.
    has_kv_cache_size_tokens: bool
    #: Splits the waiting gauge by reason.
    has_waiting_by_reason: bool
    #: Can send SSE comments while a stream is silent.
    has_sse_keep_alive: bool
    #: While draining after SIGTERM it keeps accepting, says 200 on /health and answers at once with an empty abort.
    waits_as_drain: bool


def behaviour_of(version: str) -> EngineBehaviour:
    """The behaviour of an engine that answers `version`, such as `0.32.0` or `0.33.0rc1+cpu`. Never raises.

    A release candidate or a build counts as its release.
    """
    number = parse_version(version)
    # Safe where unknown: expect the clamp, the 503 and the drain; rely on no header, gauge or comment.
    known = number or (0, 0, 0)
    return EngineBehaviour(
        version=number,
        clamps_output=number is None or known >= (0, 32, 0),
        has_admission_503=number is None or known >= (0, 29, 0),
        honours_priority_header=known >= (0, 29, 0),
        honours_dp_rank_header=known >= (0, 14, 0),
        has_kv_cache_size_tokens=known >= (0, 26, 0),
        has_waiting_by_reason=known >= (0, 20, 0),
        has_sse_keep_alive=known >= (0, 29, 0),
        waits_as_drain=number is None or known >= (0, 18, 0),
    )


def parse_version(version: str) -> tuple[int, int, int] | None:
    """The release number at the start of `version`, or None for anything else."""
    match = _VERSION.match(version.strip()[:64])
    if match is None:
        return None
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch or 0)


def cannot_have_started(status: int, message: str) -> bool:
    """Whether an error answer proves that the engine did no work for the request.

    A 503 is its refusal at admission (full, paused or asleep); the one 500 is an engine shutting down.
    """
    return status == 503 or (status == 500 and _SHUT_DOWN_TEXT in message)


def is_shutting_down(status: int, message: str) -> bool:
    """Whether an error answer says that the engine is on its way out."""
    return status == 500 and _SHUT_DOWN_TEXT in message
