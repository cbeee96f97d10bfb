"""Whether the first token passes a default nginx at once: python bench/nginx_first_token.py

nginx stands in front of the router with `proxy_pass` and nothing else, so that it buffers answers. The engine does not
write its second token before the client has its first: where nginx holds that back, no token ever comes. It passes
because the router says `X-Accel-Buffering: no`. As a control, the same nginx in front of the engine itself, which does
not say so, holds the token back until the answer ends.

Exit codes: 0 measured, 1 something could not be, 3 with --check where the token was held back.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import clients, machine
from bench.children import free_port
from bench.held_engine import event, held_engine, write_head
from bench.proxies import nginx, nginx_version, router, router_config
from bench.script import measured, show

#: Longer than nginx takes for anything but waiting for the end of the answer.
HELD_AFTER_S = 5.0
_TOKENS = ("first", " second", " third")


class Gate:
    """Holds all tokens but the first until the client opens it."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.written = 0

    async def plot(self, _: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        write_head(writer)
        for token in _TOKENS:
            writer.write(event(token))
            await writer.drain()
            self.written += 1
            await self.opened.wait()
        writer.write(event(None, "stop") + b"data: [DONE]\n\n")
        await writer.drain()


def default_conf(port: int, upstream_port: int) -> str:
    return f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{upstream_port}; }} }}"


async def read_through(url: str, gate: Gate) -> dict[str, Any]:
    """One stream as its client sees it, and what the engine had written when the first token came."""
    began_s = time.monotonic()
    first_s: float | None = None
    written = 0
    text = ""
    async with clients.client(1) as http, opening(gate):
        body = clients.chat(is_stream=True)
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            headers = dict(answer.headers)
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line.removeprefix("data: "))["choices"]
                token = choices[0]["delta"].get("content") if choices else None
                if token and first_s is None:
                    first_s, written = time.monotonic() - began_s, gate.written
                    was_at_once = not gate.opened.is_set()
                    gate.opened.set()
                text += token or ""
    assert first_s is not None, "the answer had no token"
    return {
        "first_token_at_once": was_at_once,
        "first_token_s": round(first_s, 4),
        "engine_had_written": written,
        "text_is_whole": text == "".join(_TOKENS),
        "cache_control": headers.get("cache-control"),
        "content_type": headers.get("content-type"),
        "has_content_length": "content-length" in headers,
    }


@contextlib.asynccontextmanager
async def opening(gate: Gate) -> AsyncIterator[None]:
    """The gate opens by itself after `HELD_AFTER_S`, so that a token that is held back comes in the end."""
    timer = asyncio.get_running_loop().call_later(HELD_AFTER_S, gate.opened.set)
    try:
        yield
    finally:
        timer.cancel()


async def run(folder: Path) -> dict[str, Any]:
    found = await through_router(folder)
    without = await past_router(folder)
    control = {"control_held_back": not without["first_token_at_once"]}
    return {**found, **control, "nginx_version": nginx_version(), "machine": machine.describe()}


async def through_router(folder: Path) -> dict[str, Any]:
    """A stream from the engine through router and nginx. Raises: `Missing` without nginx."""
    gate = Gate()
    async with held_engine(gate.plot) as engine:
        with contextlib.ExitStack() as stack:
            # Started beside the loop, in which the engine has to answer meanwhile.
            ours = await asyncio.to_thread(stack.enter_context, router(router_config([engine]), folder))
            return await _behind_nginx(ours.port, folder / "ours", gate)


async def past_router(folder: Path) -> dict[str, Any]:
    """The control: the same stream from the engine through nginx alone."""
    gate = Gate()
    async with held_engine(gate.plot) as engine:
        return await _behind_nginx(engine.port, folder / "control", gate)


async def _behind_nginx(upstream_port: int, folder: Path, gate: Gate) -> dict[str, Any]:
    folder.mkdir()
    port = free_port()
    with contextlib.ExitStack() as stack:
        proxy = await asyncio.to_thread(stack.enter_context, nginx(default_conf(port, upstream_port), port, folder))
        return await read_through(proxy.url, gate)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit code 3 where the token was held back")
    parser.add_argument("--json", action="store_true", help="one line of JSON, for programs")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()

    def measure(folder: Path) -> dict[str, Any]:
        # nginx's worker may be another user, who has to get to its folder.
        folder.chmod(0o711)
        return asyncio.run(run(folder))

    found = measured("nginx", measure)
    show(found, arguments.out, json.dumps(found) if arguments.json else None)
    is_right = found["first_token_at_once"] and found["text_is_whole"] and found["control_held_back"]
    return 3 if arguments.check and not is_right else 0


if __name__ == "__main__":
    sys.exit(main())
