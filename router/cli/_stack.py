"""The demo stack: two simulated engines, a simulated relay, and a real router as a process of its own before them.

Rules: whoever enters the stack owns all of it; on every way out the router is ended by its process id, the simulators
are closed and the folder is gone. Ports are the kernel's choice. Time is real: nothing here is sped up.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from router.sim.engine import EngineShape
from router.sim.options import SimServerOptions
from router.sim.presets import preset
from router.sim.relay import relay_options
from router.sim.server import RunningSim, running

MODEL = "demo"
RELAY_MODEL = "demo-outside"
CHAT_ENGINE = "sim-chat"
BATCH_ENGINE = "sim-batch"
RELAY = "sim-relay"
#: Chat and batch part here. The demo's chats ask for some hundred tokens, its documents for many thousand.
THRESHOLD_TOKENS = 3_000

#: Four seats: few enough that a burst of chat spills over, so that the demo shows borrow and relay at work.
_CHAT_SHAPE = EngineShape(max_model_len=4_096, max_num_seqs=4, kv_cache_tokens=32_768)
_BATCH_SHAPE = EngineShape(max_model_len=32_768, max_num_seqs=4, kv_cache_tokens=131_072)
#: The router loads a tokenizer library and starts Valkey; a slow disk makes that long.
_START_S = 60.0
_STOP_S = 15.0
_POLL_S = 0.05
#: What is kept of each engine's own log. Bodies are not needed, only sizes.
_LOG_ENTRIES_MAX = 50_000
#: Lines of the router's log shown when it does not start.
_TAIL_LINES = 20

#: A process that starts the router and, on Linux, has it die with us, also when we are killed. Whoever was orphaned
#: before the kernel was told ends at once.
_LAUNCHER = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
#: What Python is given to start a router.
_SERVE = ("-m", "router", "serve")
_URL = re.compile(r"https?://[\w.\-\[\]:]+:\d+")


class StackFailed(Exception):
    """The stack did not come up. The message says what, and what the router printed last."""


@dataclass(frozen=True, slots=True)
class DemoStack:
    """A running stack. `url` is the router's root; the three simulators keep their own log of what reached them."""

    url: str
    model: str
    api_key: str
    chat_engine: RunningSim
    batch_engine: RunningSim
    relay: RunningSim


@contextlib.asynccontextmanager
async def demo_stack() -> AsyncIterator[DemoStack]:
    """Start everything, yield once the router serves, and take everything down again.

    Raises: `StackFailed` where the router does not come up.
    """
    relay_key, client_key = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="router-demo-")))
        chat = await stack.enter_async_context(running(_engine_options(_CHAT_SHAPE)))
        batch = await stack.enter_async_context(running(_engine_options(_BATCH_SHAPE)))
        relay = await stack.enter_async_context(running(relay_options(model=RELAY_MODEL, api_key=relay_key)))
        config = _config(folder, chat.url, batch.url, relay.url, relay_key=relay_key, client_key=client_key)
        file = folder / "pools.yaml"
        # JSON is YAML.
        file.write_text(json.dumps(config, indent=2))
        url = await stack.enter_async_context(_router(file, folder))
        yield DemoStack(url, MODEL, client_key, chat, batch, relay)


def _engine_options(shape: EngineShape) -> SimServerOptions:
    return SimServerOptions(
        model=MODEL,
        preset=preset("tiny-demo"),
        shape=shape,
        log_entries_max=_LOG_ENTRIES_MAX,
        log_body_max_bytes=0,
    )


def _config(
    folder: Path, chat_url: str, batch_url: str, relay_url: str, *, relay_key: str, client_key: str
) -> dict[str, Any]:
    """The router's configuration: the shapes of the two engines, and little patience with full seats."""
    return {
        "server": {"host": "127.0.0.1", "data_dir": str(folder / "data")},
        "redis": {"url": "embedded"},
        "engines": [{"name": CHAT_ENGINE, "url": chat_url}, {"name": BATCH_ENGINE, "url": batch_url}],
        "models": [
            {
                "name": MODEL,
                "threshold_tokens": THRESHOLD_TOKENS,
                "pools": {"chat": _pool(CHAT_ENGINE, _CHAT_SHAPE), "batch": _pool(BATCH_ENGINE, _BATCH_SHAPE)},
            }
        ],
        "relays": [
            {"name": RELAY, "url": relay_url, "api_key": relay_key, "models": {MODEL: RELAY_MODEL}},
        ],
        "keys": [{"name": "demo", "key": client_key}],
    }


def _pool(engine: str, shape: EngineShape) -> dict[str, Any]:
    return {"engines": [engine], "max_model_len": shape.max_model_len, "max_num_seqs": shape.max_num_seqs}


@contextlib.asynccontextmanager
async def _router(config: Path, folder: Path) -> AsyncIterator[str]:
    """A router process that serves `config`; yields its URL. Ended on every way out."""
    log = folder / "router.log"
    arguments = [*_SERVE, "-c", str(config), "--port", "0"]
    with log.open("wb") as log_file:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _LAUNCHER,
            str(os.getpid()),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log_file,
            # Ctrl-C in the terminal is ours to handle; the router gets its own signal when its turn comes.
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        try:
            async with asyncio.timeout(_START_S):
                url = await _printed_url(process.stdout)
                await _ready(url, process)
        except (TimeoutError, _RouterEnded) as error:
            late = isinstance(error, TimeoutError)
            what = f"did not serve within {_START_S:g} s" if late else f"ended with exit code {await process.wait()}"
            tail = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            raise StackFailed("\n".join([f"the router {what}", *tail])) from None
        # A pipe that nobody reads would one day block the router.
        drained = asyncio.create_task(_drain(process.stdout))
        try:
            yield url
        finally:
            drained.cancel()
            await asyncio.wait({drained})
    finally:
        await _end(process)


class _RouterEnded(Exception):
    """The process is gone, or has closed its output, before it served."""


async def _printed_url(output: asyncio.StreamReader) -> str:
    async for line in output:
        found = _URL.search(line.decode(errors="replace"))
        if found is not None:
            return found[0]
    raise _RouterEnded


async def _ready(url: str, process: asyncio.subprocess.Process) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
        while process.returncode is None:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{url}/readyz")).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(_POLL_S)
    raise _RouterEnded


async def _drain(output: asyncio.StreamReader) -> None:
    while await output.read(65_536):
        pass


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask the router to stop, and kill it if it does not."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
