"""A router in a process of its own, for what only a process does: signals, workers, its output."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx

from tests.http.scrape import Metrics
from tests.http.stack import new_client

_URL = re.compile(r"http://[\w.\-:]+")


class RouterProcess:
    """One that serves. `url` is what it printed; `output` is what it and its workers wrote so far."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, log: Path, client: httpx.AsyncClient) -> None:
        self.process = process
        self.url = url
        self.client = client
        self._log = log

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def exit_code(self) -> int:
        return await self.process.wait()

    async def metrics(self) -> Metrics:
        return Metrics((await self.client.get("/metrics")).text)

    async def is_ready(self) -> bool:
        try:
            return (await self.client.get("/readyz")).status_code == 200
        except httpx.TransportError:
            return False


@contextlib.asynccontextmanager
async def router_process(
    config: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    key: str | None = None,
    files_max: int | None = None,
) -> AsyncIterator[RouterProcess]:
    """`router serve` on `config`, ready; killed at the end if it is still there. `files_max`: files it may open."""
    command = [sys.executable, "-m", "router", "serve", "-c", str(config), "--port", "0", *arguments]
    if files_max is not None:
        command = ["sh", "-c", f'ulimit -n {files_max}; exec "$@"', "sh", *command]
    log = config.parent / "router.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {})},
        )
    try:
        while (found := _URL.search(log.read_text(errors="replace").partition("serving on ")[2])) is None:
            assert process.returncode is None, log.read_text(errors="replace")
            await asyncio.sleep(0.02)
        async with new_client(found[0], key=key) as client:
            router = RouterProcess(process, found[0], log, client)
            while not await router.is_ready():
                assert process.returncode is None, router.output
                await asyncio.sleep(0.02)
            yield router
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except FileNotFoundError:
        return False
    return state != "Z"


def children(pid: int) -> dict[int, str]:
    """The running children of a process, and how each was started."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = (folder / "stat").read_text().rpartition(") ")[2].split()[1]
            if int(parent) == pid and is_running(int(folder.name)):
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return found
