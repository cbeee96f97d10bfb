"""Several worker processes behind one port: all serve, their counts add up, and none outlives the parent."""

import asyncio
import json
import os
import resource
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from router.sim.server import running
from tests.http.process import RouterProcess, children, is_running, router_process
from tests.http.scrape import Metrics
from tests.http.setting import MODEL, chat_body, chat_sim, long_sim, model_config, write_config
from tests.http.stack import new_client, until
from tests.http.wire import Wire, request

CAPACITY = "router_ledger_capacity_tokens"


@asynccontextmanager
async def two_workers(folder: Path) -> AsyncIterator[RouterProcess]:
    async with running(chat_sim()) as c, running(long_sim()) as long:
        models = [model_config(batch={"prefill_lanes": 2})]
        config = write_config(folder, {"c": c.url, "l": long.url}, models=models)
        async with router_process(config, "--workers", "2") as router:
            await all_workers_serve(router)
            yield router


def workers_of(router: RouterProcess) -> set[int]:
    return {pid for pid, command in children(router.process.pid).items() if "spawn_main" in command}


async def page_of(router: RouterProcess) -> Metrics:
    """One scrape on a connection of its own, which any worker may take."""
    async with new_client(router.url) as client:
        return Metrics((await client.get("/metrics")).text)


async def all_workers_serve(router: RouterProcess) -> None:
    """Both know the engine: the least of what they see of it is that it is up, and its capacity is halved between
    them."""
    page = await page_of(router)
    while page.value("router_engine_up", engine="c") != 1 or page.value(CAPACITY, engine="c") < 15_000:
        await asyncio.sleep(0.02)
        page = await page_of(router)


async def settled_page(router: RouterProcess) -> Metrics:
    """The counts once every call has ended; a worker tells its gauges anew each second."""
    while True:
        page = await page_of(router)
        ended = page.value("router_requests_total") == page.value("router_arrivals_total")
        if ended and page.value("router_in_flight_requests") == 0:
            return page
        await asyncio.sleep(0.02)


async def chats(router: RouterProcess, number: int) -> set[int]:
    """Chats on connections of their own, so that the kernel deals them out."""

    async def one() -> int:
        async with new_client(router.url) as client:
            return (await client.post("/v1/chat/completions", json=chat_body(max_tokens=2))).status_code

    return set(await asyncio.gather(*(one() for _ in range(number))))


def open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


async def test_the_kernel_deals_connections_out_to_both_workers(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as router, AsyncExitStack() as connections:
        idle = {pid: open_files(pid) for pid in workers_of(router)}

        async def both_have_some() -> None:
            while not all(open_files(pid) > count for pid, count in idle.items()):
                wire = await connections.enter_async_context(Wire(router.port))
                await wire.send(request("/healthz", method="GET"))
                await wire.answer()

        await both_have_some()

        assert len(idle) == 2


async def test_both_workers_serve_their_metrics_add_up_and_a_killed_one_is_started_again(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as router:
        workers = workers_of(router)
        statuses = await chats(router, 40)
        async with new_client(router.url) as client:
            long = await client.post("/v1/completions", json={"model": MODEL, "prompt": [1] * 3_000, "max_tokens": 2})
            unknown = await client.post("/v1/chat/completions", json={**chat_body(), "model": "nope"})
        await settled_page(router)
        pages = [await page_of(router) for _ in range(6)]

        victim = min(workers)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: len(workers_of(router) - {victim}) == 2)
        # The new one knows of no engine for its first moment.
        while await chats(router, 20) != {200}:
            await asyncio.sleep(0.02)
        after = await settled_page(router)
        router.signal()
        code = await router.exit_code()

        assert len(workers) == 2
        assert (statuses, long.status_code, unknown.status_code) == ({200}, 200, 404)
        assert {page.value("router_requests_total", outcome="completed") for page in pages} == {41}
        assert {page.value("router_requests_total", outcome="refused_not_found") for page in pages} == {1}
        assert {page.value("router_arrivals_total") for page in pages} == {42}
        assert {page.value("router_in_flight_requests") for page in pages} == {0}
        assert after.value("router_requests_total", outcome="completed") >= 61
        assert after.value("router_arrivals_total") == after.value("router_requests_total")
        assert after.value("router_attempts_total", result="answered") >= 61
        assert after.value("router_process_resident_memory_bytes") > 2 * 20 * 2**20
        assert after.value("router_process_open_fds") > 2 * 10
        assert after.value("router_loop_delay_seconds_count") > 0
        assert after.value("router_log_lines_dropped_total") == 0
        assert code == 0


async def test_workers_that_may_open_no_file_do_not_show_a_part_of_the_counts(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as router, Wire(router.port) as kept:
        await chats(router, 4)
        await kept.send(request("/metrics", method="GET"))
        before, _, page = await kept.answer()
        limits = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in workers_of(router)}

        for pid, (_, hard) in limits.items():
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
        await kept.send(request("/metrics", method="GET"))
        refused, headers, body = await kept.answer()
        for pid, limit in limits.items():
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
        await kept.send(request("/metrics", method="GET"))
        after, _, _ = await kept.answer()

        assert (before, refused, after) == (200, 503, 200)
        assert b"router_arrivals_total" in page
        assert (json.loads(body)["error"]["code"], headers["retry-after"]) == ("metrics_unreadable", "5")
        assert "Traceback" not in router.output


async def test_batch_requests_of_both_workers_get_their_turn(tmp_path: Path) -> None:
    async def long(client_of: str) -> int:
        async with new_client(client_of) as client:
            body = {"model": MODEL, "prompt": [1] * 3_000, "max_tokens": 2}
            return (await client.post("/v1/completions", json=body)).status_code

    async with two_workers(tmp_path) as router:
        statuses = await asyncio.gather(*(long(router.url) for _ in range(24)))
        page = await settled_page(router)

        assert statuses == [200] * 24
        assert page.value("router_requests_total", **{"outcome": "completed", "class": "batch"}) == 24


async def test_the_address_is_announced_only_once_a_worker_serves(tmp_path: Path) -> None:
    async with running(chat_sim()) as c, running(long_sim()) as long:
        tokenizer = {"kind": "huggingface", "path": "tokenizer.json"}
        (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
        models = [model_config(batch={"prefill_lanes": 2}, tokenizer=tokenizer)]
        config = write_config(tmp_path, {"c": c.url, "l": long.url}, models=models)
        command = (sys.executable, "-m", "router", "serve", "-c", str(config), "--port", "0", "--workers", "2")

        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        output, log = await process.communicate()

        assert process.returncode == 2
        assert output == b""
        assert b"tokenizer.json" in log
        assert b"never awaited" not in log


async def test_with_the_parent_killed_the_workers_and_the_store_are_gone(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as router:
        family = set(children(router.process.pid))
        commands = children(router.process.pid).values()

        router.process.kill()
        await router.exit_code()
        await until(lambda: not any(is_running(pid) for pid in family))

        assert len(family) >= 3
        assert any("valkey" in command for command in commands)
