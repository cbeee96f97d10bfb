"""`router bench`: a stated load against any OpenAI-compatible server, and what came of it.

Decides the exit code: 0 all well, 1 more failures than allowed (or no target to measure), 2 a usage error, 130 stopped
by a signal; what was measured until then is still shown. It must never report a run as
better than it was: a failure is no fast answer.
"""

import asyncio
import contextlib
import datetime
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from router.cli._signals import EXIT_INTERRUPTED, Stopper, run
from router.cli._stack import StackFailed, demo_stack
from router.cli._tables import report_tables
from router.clock import SystemClock
from router.config.environment import named_secret
from router.sim.load import Load, LoadOptions
from router.sim.measures import Slo, parse_duration_s, parse_slos
from router.sim.report import Report, report
from router.sim.workload import (
    FOREVER_S,
    FULL_SHAPES,
    REQUESTS_MAX,
    TINY_SHAPES,
    LoadSpec,
    PlannedRequest,
    parse_mix,
    plan,
)

_PROGRESS_EVERY_S = 0.2
_DEFAULT_DURATION = "30s"
_Parsed = TypeVar("_Parsed")


class TargetFailed(Exception):
    """The server to be measured cannot be measured. The message says why."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One bench, checked. `url` None means the demo stack."""

    url: str | None
    model: str | None
    api_key: str | None
    spec: LoadSpec
    planned: Sequence[PlannedRequest]
    slos: tuple[Slo, ...]
    in_flight_max: int
    timeout_s: float
    ignore_eos: bool
    as_json: bool
    out: Path | None
    max_failed_ratio: float


def bench(
    mix: Annotated[str, typer.Option(help="Share of each class, adding up to 1.")] = "chat:0.9,batch:0.1",
    url: Annotated[str | None, typer.Option(help="Server to measure; without it, the demo stack is started.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask for; without it, the server's first.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable that holds the server's key.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Mean arrivals a second; inf sends all at once.")] = 4.0,
    cv: Annotated[float, typer.Option(help="Burstiness: deviation of the gaps over their mean. 1 is Poisson.")] = 1.0,
    duration: Annotated[
        str | None,
        typer.Option(help=f"How long requests arrive, e.g. 2m. Without it and --num-prompts: {_DEFAULT_DURATION}."),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="How many requests arrive at most.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same load.")] = 0,
    lengths: Annotated[
        str | None, typer.Option(help="full or tiny prompts; without it, full for --url and tiny for the demo stack.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="Promises that goodput is measured by: chat.ttft=1s,batch.e2e=8h.")
    ] = None,
    max_in_flight: Annotated[
        int, typer.Option(min=1, max=20_000, help="Requests in flight at most; more fail.")
    ] = 1000,
    timeout: Annotated[str, typer.Option(help="Longest time of one request.")] = "10m",
    ignore_eos: Annotated[bool, typer.Option(help="Ask vLLM for answers of full length.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON object to this file.")] = None,
    max_failed_ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of failed requests above which the exit code is 1.")
    ] = 0.0,
) -> None:
    """Measure a server under an open-loop mix of chat and batch."""
    if out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(out.parent)!r}", param_hint="--out")
    spec = _spec(mix, rate, cv, duration, num_prompts, seed, lengths or ("tiny" if url is None else "full"))
    checked = _Run(
        url=url if url is None else _checked("--url", _base_url, url),
        model=model,
        api_key=None if api_key_env is None else _checked("--api-key-env", named_secret, api_key_env).reveal(),
        spec=spec,
        planned=tuple(plan(spec)),
        slos=() if slo is None else _checked("--slo", parse_slos, slo),
        in_flight_max=max_in_flight,
        timeout_s=_checked("--timeout", parse_duration_s, timeout),
        ignore_eos=ignore_eos,
        as_json=as_json,
        out=out,
        max_failed_ratio=max_failed_ratio,
    )
    if not checked.planned:
        raise typer.BadParameter("no request arrives in this time at this rate", param_hint="--duration")
    try:
        code = run(lambda stopper: _bench(checked, stopper))
    except (TargetFailed, StackFailed) as error:
        typer.echo(f"router bench: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(code)


def _checked(option: str, parse: Callable[[str], _Parsed], text: str) -> _Parsed:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _spec(
    mix: str, rate: float, cv: float, duration: str | None, num_prompts: int | None, seed: int, lengths: str
) -> LoadSpec:
    shapes = {"full": FULL_SHAPES, "tiny": TINY_SHAPES}
    if lengths not in shapes:
        raise typer.BadParameter(f"{lengths!r} is neither full nor tiny", param_hint="--lengths")
    if duration is None and num_prompts is None:
        duration = _DEFAULT_DURATION
    shares = _checked("--mix", parse_mix, mix)
    duration_s = FOREVER_S if duration is None else _checked("--duration", parse_duration_s, duration)
    if not math.isinf(rate) and num_prompts is None and rate * duration_s > REQUESTS_MAX:
        raise typer.BadParameter(f"that is more than {REQUESTS_MAX} requests", param_hint="--rate")
    try:
        return LoadSpec(
            mix=shares,
            rate_per_s=rate,
            seed=seed,
            cv=cv,
            duration_s=duration_s,
            requests_max=REQUESTS_MAX if num_prompts is None else num_prompts,
            shapes=shapes[lengths],
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _base_url(text: str) -> str:
    try:
        parsed = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError(f"{text!r} is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{text!r} is not an http:// or https:// URL")
    return text.rstrip("/").removesuffix("/v1")


async def _bench(checked: _Run, stopper: Stopper) -> int:
    async with _target(checked) as options:
        load = Load(options)
        stopper.on_stop(load.stop)
        async with _progress(checked, load):
            await load.run(checked.planned)
    finished = report(load.results, duration_s=load.duration_s, slos=checked.slos)
    fields = {**_header(checked, options, load), **finished.fields()}
    _show(checked, finished, fields)
    if load.is_stopped:
        return EXIT_INTERRUPTED
    return 1 if finished.total.failed_ratio > checked.max_failed_ratio else 0


@contextlib.asynccontextmanager
async def _target(checked: _Run) -> AsyncIterator[LoadOptions]:
    """Where the load goes: the given server, or a demo stack that lives as long as the run."""
    if checked.url is None:
        async with demo_stack() as stack:
            yield _options(checked, stack.url, checked.model or stack.model, stack.api_key)
    else:
        model = checked.model or await _first_model(checked.url, checked.api_key)
        yield _options(checked, checked.url, model, checked.api_key)


def _options(checked: _Run, url: str, model: str, api_key: str | None) -> LoadOptions:
    return LoadOptions(
        base_url=url,
        model=model,
        api_key=api_key,
        in_flight_max=checked.in_flight_max,
        request_timeout_s=checked.timeout_s,
        drain_s=checked.timeout_s,
        ignore_eos=checked.ignore_eos,
    )


async def _first_model(url: str, api_key: str | None) -> str:
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=10.0, headers=headers) as client:
            answer = await client.get(f"{url}/v1/models")
    except httpx.HTTPError as error:
        raise TargetFailed(f"{url} does not answer: {type(error).__name__} {error}") from None
    if answer.status_code != httpx.codes.OK:
        fix = "name the model with --model"
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            fix = "name the variable that holds a valid key with --api-key-env"
        raise TargetFailed(f"{url}/v1/models answered {answer.status_code}; {fix}")
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise TargetFailed(f"{url}/v1/models lists no model; name it with --model") from None


@contextlib.asynccontextmanager
async def _progress(checked: _Run, load: Load) -> AsyncIterator[None]:
    """A bar on stderr while the load runs; none where only a program reads."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[in_flight]} in flight"),
        TimeElapsedColumn(),
    )
    hidden = checked.as_json and not console.is_terminal
    with Progress(*columns, console=console, disable=hidden) as progress:
        bar = progress.add_task("requests", total=len(checked.planned), in_flight=0)

        def update() -> None:
            progress.update(bar, completed=len(load.results), in_flight=sum(load.in_flight.values()))

        async def keep_updating() -> None:
            while True:
                update()
                await asyncio.sleep(_PROGRESS_EVERY_S)

        updating = asyncio.create_task(keep_updating())
        try:
            yield
        finally:
            updating.cancel()
            await asyncio.wait({updating})
            update()


def _header(checked: _Run, options: LoadOptions, load: Load) -> dict[str, Any]:
    """What was run, in the names of `vllm bench serve` where it has one."""
    spec = checked.spec
    return {
        "date": _now_word(),
        "backend": "openai-chat",
        "target": "demo stack" if checked.url is None else checked.url,
        "model_id": options.model,
        "num_prompts": len(checked.planned),
        "request_rate": "inf" if math.isinf(spec.rate_per_s) else spec.rate_per_s,
        "burstiness": None if spec.cv == 0 else round(1 / spec.cv**2, 6),
        "cv": spec.cv,
        "seed": spec.seed,
        "mix": {request_class.value: round(share, 6) for request_class, share in spec.mix.items()},
        "slos": [{"class": slo.request_class, "metric": slo.metric, "limit_ms": slo.limit_ms} for slo in checked.slos],
        "max_concurrency": options.in_flight_max,
        "max_concurrent_requests": load.in_flight_peak,
        "max_failed_ratio": checked.max_failed_ratio,
    }


def _now_word() -> str:
    """The time of the report, UTC, as `vllm bench serve` writes it."""
    return datetime.datetime.fromtimestamp(SystemClock().unix_s(), datetime.UTC).strftime("%Y%m%d-%H%M%S")


def _show(checked: _Run, finished: Report, fields: dict[str, Any]) -> None:
    text = json.dumps(fields, indent=2)
    if checked.out is not None:
        checked.out.write_text(text + "\n")
    if checked.as_json:
        typer.echo(text)
    else:
        Console().print(report_tables(finished))
