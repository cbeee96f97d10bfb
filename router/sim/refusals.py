"""How the simulated server says no: vLLM's error bodies by dialect and version, or an outside provider's."""

import json
from typing import Any

from router.request import Endpoint
from router.sim.options import SimServerOptions

#: Anthropic's words, used from 0.33; 0.32 puts its own type there.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}

#: A provider's stable codes, as OpenAI's API reference lists them.
_PROVIDER_CODES = {
    401: "invalid_api_key",
    404: "model_not_found",
    429: "rate_limit_exceeded",
    500: "server_error",
    503: "service_unavailable",
}

BUSY_TEXT = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
DEAD_TEXT = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class Refusal(Exception):
    """An answer that is an error. `type` is vLLM's word for it; `is_detail` gives the framework's `{"detail": ...}`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "BadRequestError",
        param: str | None = None,
        retry_after_s: float | None = None,
        is_detail: bool = False,
        is_validation: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.retry_after_s = retry_after_s
        self.is_detail = is_detail
        self.is_validation = is_validation

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": f"{self.retry_after_s:g}"}

    def content(self, endpoint: Endpoint, options: SimServerOptions) -> dict[str, Any]:
        """The JSON body."""
        if self.is_detail:
            return {"detail": self.message}
        if endpoint in (Endpoint.MESSAGES, Endpoint.COUNT_TOKENS) and not self.is_validation:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error") if options.is_at_least("0.33") else self.type
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        if options.face == "provider":
            code = _PROVIDER_CODES.get(self.status)
            kind = "server_error" if self.status >= 500 else "invalid_request_error"
            return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}
        if self.status == 401:
            return {"error": "Unauthorized"}
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}}

    def event(self, endpoint: Endpoint, options: SimServerOptions) -> bytes:
        """The same as an event inside a stream that began with 200."""
        raw = json.dumps(self.content(endpoint, options), ensure_ascii=False, separators=(",", ":")).encode()
        name = b"event: error\n" if endpoint is Endpoint.MESSAGES else b""
        return name + b"data: " + raw + b"\n\n"


def invalid(message: str, param: str | None = None, value: object = None) -> Refusal:
    """400 from a check of the request's meaning; vLLM names field and value at the end of the text."""
    suffix = "" if param is None else f" (parameter={param}, value={value})"
    return Refusal(400, message + suffix, param=param)


def malformed(kind: str, location: str, text: str, shown: str) -> Refusal:
    """400 from the body's schema."""
    detail = f"{{'type': '{kind}', 'loc': '{location}', 'msg': '{text}', 'input': '{shown}'}}"
    return Refusal(400, f"1 validation error:\n  {detail}", type="Bad Request", param=location, is_validation=True)


def busy() -> Refusal:
    """503: `max_num_queued_reqs` is reached. Without Retry-After, as vLLM."""
    return Refusal(503, BUSY_TEXT, type="Service Unavailable")


def engine_failed(status: int) -> Refusal:
    """What a client hears when the engine behind the server fails."""
    if status == 503:
        return busy()
    return Refusal(status, DEAD_TEXT, type="InternalServerError")


def too_long(limit_tokens: int, prompt_tokens: int, *, is_exact: bool) -> Refusal:
    """The prompt alone exceeds the context. A counted text is cut one past the limit, so its length is not told."""
    shown = prompt_tokens if is_exact else limit_tokens + 1
    return invalid(
        f"This model's maximum context length is {limit_tokens} tokens. However, your prompt contains "
        f"{'' if is_exact else 'at least '}{shown} input tokens, which exceeds this limit even without any output "
        f"tokens. Please reduce the length of the input prompt.",
        "input_tokens",
        shown,
    )
