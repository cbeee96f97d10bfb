"""`router sim serve`: one simulated engine, or outside provider, in this terminal until Ctrl-C or SIGTERM."""

import asyncio
import signal
from typing import Annotated, Literal

import msgspec
import typer

from router.sim.engine import EngineShape
from router.sim.faults import FaultRule, Faults
from router.sim.options import OutputLengths, SimServerOptions
from router.sim.presets import PRESETS, preset
from router.sim.server import running
from router.sim.text import ByteTokenizer

sim_app = typer.Typer(name="sim", help="Simulated engines: vLLM's HTTP face over a model of its scheduler.")


@sim_app.callback()
def _sim() -> None:
    """Simulated engines: vLLM's HTTP face over a model of its scheduler."""


@sim_app.command()
def presets() -> None:
    """List the engine presets and where their numbers come from."""
    for each in PRESETS.values():
        typer.echo(f"{each.name:<20} {each.kv_cache_tokens:>8} KV tokens  {each.source}")


@sim_app.command()
def serve(
    model: Annotated[str, typer.Option(help="The model name it answers with.")] = "sim-model",
    alias: Annotated[list[str] | None, typer.Option(help="Another accepted model name; may be repeated.")] = None,
    preset_name: Annotated[
        str, typer.Option("--preset", help="Engine timing; see `router sim presets`.")
    ] = "tiny-demo",
    host: Annotated[str, typer.Option(help="Address to bind. It asks for no key of its own accord.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 lets the kernel choose.", min=0, max=65535)] = 8100,
    max_model_len: Annotated[int, typer.Option(help="Context limit, tokens.", min=2)] = 8192,
    max_num_seqs: Annotated[int, typer.Option(help="Seats in the running batch.", min=1)] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token budget of one step.", min=1)] = 8192,
    kv_cache_tokens: Annotated[int | None, typer.Option(help="KV cache, tokens; the preset's where unset.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.", min=1)] = 16,
    scheduling_policy: Annotated[str, typer.Option(help="fcfs or priority.")] = "fcfs",
    long_prefill_token_threshold: Annotated[int, typer.Option(help="Cap of one prefill chunk; 0 is off.", min=0)] = 0,
    max_num_queued_reqs: Annotated[int | None, typer.Option(help="503 beyond this many in flight.", min=1)] = None,
    version: Annotated[str, typer.Option(help="The vLLM version to behave as.")] = "0.32.0",
    time_scale: Annotated[
        float, typer.Option(help="Multiplies every step: 1 is real time, 0 flat out.", min=0.0)
    ] = 1.0,
    bytes_per_token: Annotated[int, typer.Option(help="UTF-8 bytes that count as one token.", min=1, max=64)] = 4,
    output_median_tokens: Annotated[float, typer.Option(help="Median answer where no cap is set.", min=1.0)] = 120.0,
    face: Annotated[str, typer.Option(help="vllm, or provider for an outside relay.")] = "vllm",
    api_key: Annotated[str | None, typer.Option(help="Key asked for on /v1.")] = None,
    fault: Annotated[
        list[str] | None, typer.Option(help='A fault rule as JSON, such as {"kind":"cut","value":3}; may be repeated.')
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every draw.")] = 0,
) -> None:
    """Serve one simulated engine. The first line on stdout is its URL."""
    try:
        shape = EngineShape(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_tokens=kv_cache_tokens,
            block_size=block_size,
            scheduling_policy=msgspec.convert(scheduling_policy, Literal["fcfs", "priority"]),
            long_prefill_token_threshold=long_prefill_token_threshold,
            max_num_queued_reqs=max_num_queued_reqs,
        )
        options = SimServerOptions(
            model=model,
            aliases=tuple(alias or ()),
            preset=preset(preset_name),
            shape=shape,
            version=version,
            time_scale=time_scale,
            host=host,
            port=port,
            tokenizer=ByteTokenizer(bytes_per_token),
            output_lengths=OutputLengths(median_tokens=output_median_tokens),
            faults=Faults(tuple(msgspec.json.decode(each, type=FaultRule) for each in fault or ())),
            face=msgspec.convert(face, Literal["vllm", "provider"]),
            api_key=api_key,
            seed=seed,
        )
        asyncio.run(_serve(options))
    except (ValueError, OSError) as error:
        typer.echo(f"router sim: {error}", err=True)
        raise typer.Exit(2) from error


async def _serve(options: SimServerOptions) -> None:
    """Until SIGINT or SIGTERM. What runs then is cut off at once, as vLLM does without a shutdown timeout."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stopping.set)
    async with running(options) as sim:
        typer.echo(sim.url)
        await stopping.wait()
