"""The one error that reaches a client, in the two shapes that clients know.

Whatever goes wrong is translated once, at the adapter where it is seen, into an `ApiError`. Its message says what was
asked, what the limit is and what to do, with numbers and units. It never holds a key, a URL or a file path.
"""

import json
import math
from dataclasses import dataclass, field
from enum import StrEnum

#: Anthropic's `error.type` for a status. Source: Anthropic API reference, "Errors"; 503 as vLLM answers it.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

#: OpenAI's `error.type` for a status. Source: openai-python's exceptions and the API reference, "Error codes".
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ErrorShape(StrEnum):
    """Which family of clients reads the answer."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


@dataclass(slots=True, eq=False)
class ApiError(Exception):
    """A refusal or failure, ready to be written to a client.

    `status` is the HTTP status (400 to 599). `code` is a stable word for programs, `message` a sentence for people,
    `param` the field that is wrong, if one is. `retry_after_s` is set on every 429 and 503 that time can mend; it is
    sent as whole seconds, at least 1 and at most 60 (openai-python sleeps exactly what it is told).
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"

    @property
    def type(self) -> str:
        """OpenAI's word for the family of this error."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return _OPENAI_TYPES.get(self.status, default)

    def body(self, shape: ErrorShape = ErrorShape.OPENAI) -> bytes:
        """The JSON body in `shape`, without a trailing newline."""
        if shape is ErrorShape.ANTHROPIC:
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            anthropic = {"type": "error", "error": {"type": kind, "message": self.message}}
            return json.dumps(anthropic, ensure_ascii=False).encode()
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode()

    def event(self, shape: ErrorShape = ErrorShape.OPENAI) -> bytes:
        """The same error as one complete server-sent event, for a stream that has already begun."""
        if shape is ErrorShape.ANTHROPIC:
            return b"event: error\ndata: " + self.body(shape) + b"\n\n"
        return b"data: " + self.body(shape) + b"\n\n"

    def response_headers(self) -> dict[str, str]:
        """Content type, `Retry-After` where one is known, and the error's own headers."""
        headers = {"content-type": "application/json", **self.headers}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(min(60, max(1, math.ceil(self.retry_after_s))))
        return headers


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """400: the client's own mistake; never retried, never blamed on an engine."""
    return ApiError(400, code, message, param)


def nested_too_deeply() -> ApiError:
    """400 for JSON that Python's recursion limit does not let be read or written."""
    return bad_request("The JSON is nested too deeply; 1,000 levels are more than enough.", code="invalid_json")
