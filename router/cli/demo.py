"""`router demo`: the whole router at work on this machine, with no GPU and no outside service.

Starts the demo stack, sends mixed traffic through the router and shows what went where. Decides the exit code: 0 only
if arrivals equal the sum of outcomes, nothing was misrouted and nothing failed without an explanation; 1 otherwise, or
where the stack does not start; 2 a usage error; 130 where a bounded run was stopped by a signal.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from router.cli._board import Board, EngineLoad
from router.cli._signals import EXIT_INTERRUPTED, Stopper, run
from router.cli._stack import BATCH_ENGINE, CHAT_ENGINE, RELAY, THRESHOLD_TOKENS, DemoStack, StackFailed, demo_stack
from router.cli._verdict import Seen, Sight, Verdict, demo_fields, judge
from router.sim.load import Load, LoadOptions
from router.sim.measures import parse_duration_s
from router.sim.server import RunningSim
from router.sim.workload import FOREVER_S, TINY_SHAPES, LoadSpec, parse_mix, plan

#: About one document in fourteen. Bursts (gaps twice as uneven as Poisson's) fill the chat pool now and then.
_MIX = "chat:0.93,batch:0.07"
_CV = 2.0
#: Bound of a demo without end: about three hours at the default rate. Every result is kept until the end.
_REQUESTS_MAX = 100_000
#: After the last arrival a document may still wait for its turn.
_DRAIN_S = 120.0
_REDRAW_EVERY_S = 0.5
_DEFAULT_DURATION = "20s"
#: The simulated engines' own rule for text.
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class _Run:
    """One demo, checked."""

    spec: LoadSpec
    is_bounded: bool
    as_json: bool


def demo(
    once: Annotated[bool, typer.Option("--once", help="Stop by itself instead of running until Ctrl-C.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="No live table; one JSON object on stdout at the end.")
    ] = False,
    duration: Annotated[
        str | None,
        typer.Option(help=f"How long requests arrive; implies --once. Default with --once: {_DEFAULT_DURATION}."),
    ] = None,
    rate: Annotated[float, typer.Option(min=0.1, max=100.0, help="Mean arrivals a second.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Same seed, same requests at the same times.")] = 1,
) -> None:
    """Show the router at work on simulated engines."""
    is_bounded = once or duration is not None
    duration_s = FOREVER_S
    if is_bounded:
        try:
            duration_s = parse_duration_s(duration or _DEFAULT_DURATION)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--duration") from None
    spec = LoadSpec(
        mix=parse_mix(_MIX),
        rate_per_s=rate,
        seed=seed,
        cv=_CV,
        duration_s=duration_s,
        requests_max=_REQUESTS_MAX,
        shapes=TINY_SHAPES,
    )
    try:
        code = run(lambda stopper: _demo(_Run(spec, is_bounded, as_json), stopper))
    except StackFailed as error:
        typer.echo(f"router demo: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(code)


async def _demo(checked: _Run, stopper: Stopper) -> int:
    if not checked.as_json:
        typer.echo("starting Valkey, two simulated engines, a simulated relay and the router ...", err=True)
    async with demo_stack() as stack:
        options = LoadOptions(stack.url, stack.model, stack.api_key, drain_s=_DRAIN_S, request_timeout_s=_DRAIN_S)
        load = Load(options)
        stopper.on_stop(load.stop)
        async with _live(checked, load, stack):
            await load.run(plan(checked.spec))
        sight = _sight(stack)
    verdict = judge(load.results, load.arrived, sight)
    fields = demo_fields(load.results, load.arrived, sight, verdict, duration_s=load.duration_s)
    if checked.as_json:
        typer.echo(json.dumps({**fields, "seed": checked.spec.seed, "rate": checked.spec.rate_per_s}, indent=2))
    else:
        _say(fields, verdict)
    if checked.is_bounded and load.is_stopped:
        return EXIT_INTERRUPTED
    return 0 if verdict.is_good else 1


def _sight(stack: DemoStack) -> Sight:
    return Sight(
        chat=_seen(stack.chat_engine),
        batch=_seen(stack.batch_engine),
        relay=_seen(stack.relay),
        threshold_tokens=THRESHOLD_TOKENS,
    )


def _seen(sim: RunningSim) -> tuple[Seen, ...]:
    # A prompt that the engine refused as too long was never counted: its bytes say how long it was.
    return tuple(
        Seen(entry.prompt_tokens or entry.body_bytes // _BYTES_PER_TOKEN, entry.x_request_id, entry.status)
        for entry in sim.log.entries()
    )


@contextlib.asynccontextmanager
async def _live(checked: _Run, load: Load, stack: DemoStack) -> AsyncIterator[None]:
    """The live table on stdout while the load runs, unless a program reads there."""
    if checked.as_json:
        yield
        return
    board, console = Board(), Console()
    with Live(console=console, auto_refresh=False) as live:

        def draw() -> None:
            board.take(load.results)
            elapsed_s = load.duration_s or load.elapsed_s()
            picture = board.table(elapsed_s=elapsed_s, in_flight=load.in_flight, engines=_engine_loads(stack))
            live.update(picture, refresh=True)

        async def keep_drawing() -> None:
            while True:
                await asyncio.sleep(_REDRAW_EVERY_S)
                draw()

        drawing = asyncio.create_task(keep_drawing())
        try:
            yield
        finally:
            drawing.cancel()
            await asyncio.wait({drawing})
        draw()
    if not console.is_terminal:
        console.line()


def _engine_loads(stack: DemoStack) -> list[EngineLoad]:
    named = ((CHAT_ENGINE, stack.chat_engine), (BATCH_ENGINE, stack.batch_engine), (RELAY, stack.relay))
    snapshots = ((name, sim.engine.snapshot()) for name, sim in named)
    return [EngineLoad(name, snapshot.running, snapshot.waiting) for name, snapshot in snapshots]


def _say(fields: dict[str, Any], verdict: Verdict) -> None:
    completed = fields["totals"]["completed"]
    arrivals, outcomes, misrouted = fields["arrivals"], fields["outcomes_sum"], fields["misrouted"]
    typer.echo(f"{arrivals} arrived, {outcomes} ended, {completed} completed, {misrouted} misrouted")
    for problem in verdict.problems:
        typer.echo(f"  {problem}")
    if verdict.problem_count > len(verdict.problems):
        typer.echo(f"  and {verdict.problem_count - len(verdict.problems)} more")
