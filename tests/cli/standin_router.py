"""A stand-in for the router process, for tests of the demo: sends by size of the body and names the pool.

First argument: how it behaves. Second: the file that it writes its process id to. Then what `router serve` is given.
Modes: good; misroute (long prompts go to the chat engine too); dies; silent (never says that it serves); interrupt
(Ctrl-C to its parent amid the load); interrupt-early (before it serves).
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

_MODE, _PID_FILE, _CONFIG = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[4])
_LONG_BYTES = 15_000
_seen: list[int] = []


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    if head.startswith("GET /readyz"):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()
        return
    size = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
    body = await reader.readexactly(size)
    _seen.append(size)
    if _MODE == "interrupt" and len(_seen) == 3:
        os.kill(os.getppid(), signal.SIGINT)
    is_long = size > _LONG_BYTES
    place = "batch" if is_long and _MODE != "misroute" else "chat"
    engines = json.loads(_CONFIG.read_text())["engines"]
    port = int(engines[1 if place == "batch" else 0]["url"].rsplit(":", 1)[1])
    upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", port)
    try:
        asked = f"POST /v1/chat/completions HTTP/1.1\r\nhost: e\r\nconnection: close\r\ncontent-length: {size}\r\n"
        upstream.write(asked.encode() + b"content-type: application/json\r\n\r\n" + body)
        status = await upstream_reader.readline()
        writer.write(status + f"x-router-pool: {place}\r\nx-router-engine: sim-{place}\r\n".encode())
        writer.write(b"x-router-reason: by_size\r\nx-router-queue-wait-ms: 1.5\r\n")
        while data := await upstream_reader.read(65_536):
            writer.write(data)
            await writer.drain()
    finally:
        upstream.close()
        writer.close()


async def _main() -> None:
    _PID_FILE.write_text(str(os.getpid()))
    if _MODE == "dies":
        sys.exit("pools.yaml is not to my taste")
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    if _MODE == "interrupt-early":
        os.kill(os.getppid(), signal.SIGINT)
    elif _MODE != "silent":
        sys.stdout.write(f"router serves http://127.0.0.1:{server.sockets[0].getsockname()[1]} now\n")
        sys.stdout.flush()
    async with server:
        await server.serve_forever()


asyncio.run(_main())
