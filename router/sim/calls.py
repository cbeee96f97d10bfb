"""An HTTP body as the simulated server understands it: vLLM's checks, in vLLM's order, with vLLM's texts.

Content type and JSON, schema, model, meaning, lengths. Only fields that change what happens are read; others are
ignored as vLLM does. Nothing here submits or answers.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.request import Endpoint
from router.sim.options import SimServerOptions
from router.sim.refusals import Refusal, invalid, malformed, too_long
from router.sim.text import text_of

#: `/v1/completions` without `max_tokens`. Source: the field's default in vLLM's completion protocol.
_COMPLETION_MAX_TOKENS = 16
#: Characters a token can stand for at most, before vLLM refuses without tokenizing. Source: seen on 0.32.0.
_CHARS_PER_TOKEN_MAX = 128

_CAP_FIELDS = {
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.RESPONSES: ("max_output_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
}


@dataclass(frozen=True, slots=True)
class SimPrompt:
    """One prompt: its tokens, and its text for `echo` (None for token ids)."""

    tokens: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Call:
    """One inference call that passed every check.

    `max_tokens` is the client's cap or None; `limit_tokens` what each sequence may generate at most, after clamping and
    defaults, by prompt. `sequences` = prompts * n, in the order of the answer's `index`.
    """

    endpoint: Endpoint
    model: str
    prompts: tuple[SimPrompt, ...]
    max_tokens: int | None
    limits_tokens: tuple[int, ...]
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    request_id: str | None
    ignore_eos: bool
    echo: bool
    fields: Mapping[str, Any]

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.tokens for prompt in self.prompts)

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.n


def parse_body(body: bytes, content_type: str) -> dict[str, Any]:
    """The JSON object of a POST. Raises: `Refusal`."""
    if content_type.split(";", maxsplit=1)[0].strip().lower() != "application/json":
        text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise Refusal(400, text, type="Bad Request", is_validation=True)
    if not body:
        raise malformed("missing", "body", "Field required", "None")
    try:
        parsed = json.loads(body)
    except (json.JSONDecodeError, RecursionError) as error:
        position = error.pos if isinstance(error, json.JSONDecodeError) else 0
        raise malformed("json_invalid", f"body.{position}", "JSON decode error", "<dict of 0 items>") from error
    except ValueError as error:
        # Not UTF-8, or a number of more than 4,300 digits.
        raise Refusal(400, "There was an error parsing the body", is_detail=True) from error
    if not isinstance(parsed, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        raise malformed("model_attributes_type", "body", text, f"<{type(parsed).__name__} of {_size(parsed)} items>")
    return parsed


def parse_call(
    endpoint: Endpoint, fields: dict[str, Any], headers: Mapping[str, str], options: SimServerOptions
) -> Call:
    """Everything vLLM checks before the engine sees a request. Raises: `Refusal`."""
    unwanted = sorted(options.rejected_fields & fields.keys())
    if unwanted:
        raise Refusal(400, f"Unrecognized request argument supplied: {unwanted[0]}", param=unwanted[0])
    cap_field, max_tokens = _cap(endpoint, fields)
    n = _integer(fields, "n", 1) or 1
    stream = bool(fields.get("stream"))
    stream_options = fields.get("stream_options") or {}
    if stream_options and not stream:
        raise malformed("value_error", "body", "Stream options can only be defined when stream=True.", "<dict>")
    priority = _integer(fields, "priority", 0) or 0
    require(endpoint, fields)
    check_model(fields, options)
    _check_temperature(fields)
    prompts = prompts_of(endpoint, fields, options)
    limits = tuple(_limit(prompt, endpoint, cap_field, max_tokens, fields, options) for prompt in prompts)
    header_priority = headers.get("x-vllm-priority")
    if header_priority is not None and options.is_at_least("0.29") and header_priority.lstrip("-").isdigit():
        priority = int(header_priority)
    return Call(
        endpoint=endpoint,
        model=options.model,
        prompts=prompts,
        max_tokens=max_tokens,
        limits_tokens=limits,
        n=n,
        stream=stream,
        include_usage=bool(stream_options.get("include_usage")),
        continuous_usage=bool(stream_options.get("continuous_usage_stats")),
        priority=priority,
        request_id=headers.get("x-request-id") or fields.get("request_id"),
        ignore_eos=bool(fields.get("ignore_eos")),
        echo=bool(fields.get("echo")) and endpoint is Endpoint.COMPLETIONS,
        fields=fields,
    )


def check_model(fields: Mapping[str, Any], options: SimServerOptions) -> None:
    """404 for a name this server does not have; none at all is served."""
    model = fields.get("model")
    if not model or model in options.names:
        return
    text = f"The model `{model}` does not exist."
    if options.face == "vllm":
        text += f" Valid aliases: {', '.join(options.names)}."
    raise Refusal(404, text, type="NotFoundError", param="model")


def prompts_of(endpoint: Endpoint, fields: Mapping[str, Any], options: SimServerOptions) -> tuple[SimPrompt, ...]:
    """The prompts of a body, rendered and counted. Raises: `Refusal`."""
    if endpoint in (Endpoint.COMPLETIONS, Endpoint.EMBEDDINGS):
        given = fields.get("prompt" if endpoint is Endpoint.COMPLETIONS else "input")
        if isinstance(given, list) and given and not all(isinstance(each, int) for each in given):
            return tuple(_plain(each, options) for each in given)
        return (_plain(given, options),)
    if endpoint is Endpoint.TOKENIZE and "prompt" in fields:
        return (_plain(fields["prompt"], options),)
    text = options.tokenizer.render(messages_of(endpoint, fields, options), fields.get("tools") or None)
    return (SimPrompt(options.tokenizer.count(text), text),)


def messages_of(
    endpoint: Endpoint, fields: Mapping[str, Any], options: SimServerOptions
) -> Sequence[Mapping[str, Any]]:
    """A conversation in chat form, whichever API it came by. Raises: `Refusal`."""
    messages: list[Mapping[str, Any]]
    if endpoint is Endpoint.RESPONSES:
        given = fields["input"]
        items = given if isinstance(given, list) else [{"role": "user", "content": given}]
        messages = [item for item in items if isinstance(item, dict)]
        system = fields.get("instructions")
    else:
        messages = [message for message in fields["messages"] if isinstance(message, dict)]
        system = fields.get("system") if endpoint in (Endpoint.MESSAGES, Endpoint.COUNT_TOKENS) else None
    if system:
        messages.insert(0, {"role": "system", "content": text_of(system)})
    if not messages:
        raise Refusal(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(_is_media(part) for part in content):
            raise Refusal(400, f"{options.model} is not a multimodal model")
    return messages


def _plain(given: object, options: SimServerOptions) -> SimPrompt:
    if isinstance(given, str) and given:
        return SimPrompt(options.tokenizer.count(given), given)
    if isinstance(given, list) and given and all(isinstance(each, int) for each in given):
        return SimPrompt(len(given), None)
    raise Refusal(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")


def require(endpoint: Endpoint, fields: Mapping[str, Any]) -> None:
    wanted: dict[Endpoint, tuple[str, ...]] = {
        Endpoint.CHAT: ("messages",),
        Endpoint.RESPONSES: ("input",),
        Endpoint.MESSAGES: ("messages", "max_tokens"),
        Endpoint.COUNT_TOKENS: ("messages",),
        Endpoint.EMBEDDINGS: ("input",),
    }
    for name in wanted.get(endpoint, ()):
        if fields.get(name) is None:
            raise malformed("missing", f"body.{name}", "Field required", f"<dict of {len(fields)} items>")
    if "messages" in wanted.get(endpoint, ()) and not isinstance(fields["messages"], list):
        raise malformed("list_type", "body.messages", "Input should be a valid list", type(fields["messages"]).__name__)


def _integer(fields: Mapping[str, Any], name: str, default: int | None) -> int | None:
    given = fields.get(name)
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int | str | float):
        raise malformed("int_type", f"body.{name}", "Input should be a valid integer", type(given).__name__)
    try:
        number = float(given) if not isinstance(given, int) else given
    except ValueError:
        text = "Input should be a valid integer, unable to parse string as an integer"
        raise malformed("int_parsing", f"body.{name}", text, str(given)[:100]) from None
    if number != number or number in (math.inf, -math.inf) or int(number) != number:
        text = "Input should be a valid integer, got a number with a fractional part"
        raise malformed("int_from_float", f"body.{name}", text, str(given)[:100])
    return int(number)


def _cap(endpoint: Endpoint, fields: Mapping[str, Any]) -> tuple[str, int | None]:
    """The field that caps the output and its value; the newer name wins."""
    names = _CAP_FIELDS.get(endpoint, ())
    for name in names:
        value = _integer(fields, name, None)
        if value is not None:
            return name, value
    return (names[-1] if names else "max_tokens"), None


def _check_temperature(fields: Mapping[str, Any]) -> None:
    temperature = fields.get("temperature")
    if not isinstance(temperature, int | float):
        return
    if not math.isfinite(temperature):
        raise invalid(f"temperature must be a finite number, got {temperature}.", "temperature", temperature)
    if temperature < 0:
        shown = float(temperature)
        raise invalid(f"temperature must be non-negative, got {shown}.", "temperature", shown)


def _limit(
    prompt: SimPrompt,
    endpoint: Endpoint,
    cap_field: str,
    max_tokens: int | None,
    fields: Mapping[str, Any],
    options: SimServerOptions,
) -> int:
    """How much one sequence may generate. Raises: `Refusal` where the lengths do not fit."""
    longest = options.shape.max_model_len
    if max_tokens is not None and max_tokens < 1:
        raise invalid(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    if max_tokens is not None and max_tokens > longest:
        name = "max_completion_tokens" if endpoint is Endpoint.MESSAGES else cap_field
        text = (
            f"{name}={max_tokens} cannot be greater than max_model_len={longest}. Please request fewer output tokens."
        )
        raise invalid(text, name, max_tokens)
    _check_prompt(prompt, longest)
    if not endpoint.generates:
        return 0
    room = longest - prompt.tokens
    if room < 1:
        raise invalid("max_tokens must be at least 1, got 0.", "max_tokens", 0)
    if max_tokens is None:
        is_completion_default = endpoint is Endpoint.COMPLETIONS and "max_tokens" not in fields
        return min(room, _COMPLETION_MAX_TOKENS) if is_completion_default else room
    if max_tokens > room and not options.is_at_least("0.32"):
        raise invalid(
            f"This model's maximum context length is {longest} tokens. However, you requested {max_tokens} output "
            f"tokens and your prompt contains {prompt.tokens} input tokens, for a total of "
            f"{prompt.tokens + max_tokens} tokens. "
            f"Please reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens",
            prompt.tokens,
        )
    return min(max_tokens, room)


def _check_prompt(prompt: SimPrompt, longest: int) -> None:
    chars_max = longest * _CHARS_PER_TOKEN_MAX
    if prompt.text is not None and len(prompt.text) > chars_max:
        raise invalid(
            f"This model's maximum context length is {longest} tokens. However, your prompt contains "
            f"{len(prompt.text)} characters (more than {chars_max} characters, which is the upper bound for {longest} "
            f"input tokens). Please reduce the length of the input prompt.",
            "input_text",
            len(prompt.text),
        )
    if prompt.tokens > longest:
        raise too_long(longest, prompt.tokens, is_exact=prompt.text is None)


def _is_media(part: object) -> bool:
    return isinstance(part, dict) and str(part.get("type", "text")) not in {
        "text",
        "input_text",
        "output_text",
        "tool_use",
        "tool_result",
        "refusal",
        "thinking",
    }


def _size(value: object) -> int:
    measure: Callable[[object], int] | None = getattr(type(value), "__len__", None)
    return 0 if measure is None else measure(value)
