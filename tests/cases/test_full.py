"""More than fits: tokens are never promised twice, memory has its bound, and what does not fit waits or is told so."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases.house import CaseEngine, House, house_of, leave, sent
from tests.http.process import RouterProcess, router_process
from tests.http.scripted import says
from tests.http.setting import LONG_TOKENS, MODEL, chat_body, model_config, write_config
from tests.http.stack import until
from tests.http.wire import request
from tests.upstream.fakes import Connection, RawServer, SeenRequest, answer

MIB = 2**20
CHAT = "/v1/chat/completions"


class Counting(CaseEngine):
    """Holds calls until it may answer; knows the most tokens and sequences that it had at one time."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.may_answer = asyncio.Event()
        self.live_tokens = self.live_sequences = 0
        self.most_tokens = self.most_sequences = 0

    async def _answer(self, seen: SeenRequest, connection: Connection) -> None:
        body = json.loads(seen.body)
        prompts = body.get("prompt") or [[1] * 8]
        prompts = prompts if isinstance(prompts[0], list) else [prompts]
        sequences = len(prompts) * body.get("n", 1)
        tokens = sum(map(len, prompts)) * body.get("n", 1) + sequences * body["max_tokens"]
        self.live_tokens += tokens
        self.live_sequences += sequences
        self.most_tokens = max(self.most_tokens, self.live_tokens)
        self.most_sequences = max(self.most_sequences, self.live_sequences)
        await self.may_answer.wait()
        # A turn for whoever would be sent too early.
        await asyncio.sleep(0)
        self.live_tokens -= tokens
        self.live_sequences -= sequences
        await connection.send(answer(b'{"choices":[]}'))


async def test_many_long_prompts_never_have_more_tokens_at_the_engine_than_its_share_and_the_rest_waits_in_sight() -> (
    None
):
    """Sixty prompts of 3,000 tokens and 200 of output, on an engine of 65,536 of which batch may commit nine tenths."""
    engine = Counting()
    settings = {"kv_share_ratio": 0.9, "prefill_lanes": 64, "max_num_seqs": 64}
    body = {"model": MODEL, "prompt": [1] * 3_000, "max_tokens": 200}
    async with house_of(batch={"l": engine}, batch_settings=settings) as house:
        calls = [asyncio.create_task(house.post("/v1/completions", body)) for _ in range(60)]
        most = int(0.9 * 65_536) // 3_200
        await until(lambda: engine.in_hand == most)
        page = await house.metrics()
        while page.value("router_queue_requests") < 60 - most or page.value("router_queue_oldest_age_seconds") <= 0:
            await asyncio.sleep(0.02)
            page = await house.metrics()
        in_hand = engine.in_hand
        engine.may_answer.set()
        answers = await asyncio.gather(*calls)

        assert (in_hand, page.value("router_queue_requests")) == (most, 60 - most)
        assert page.value("router_queue_tokens") >= (60 - most) * 3_200
        assert engine.most_tokens <= 0.9 * 65_536
        assert {each.status_code for each in answers} == {200}
        assert len(engine.calls) == 60


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 50, "n": 32, "max_tokens": 400},
        {"prompt": [[1, 2, 3]] * 64, "max_tokens": 100},
        {"prompt": [1] * 100, "n": 4, "max_tokens": 1_500},
    ],
    ids=["n", "prompts", "both large"],
)
async def test_every_sequence_of_a_call_counts_against_the_engines_tokens_and_seats(body: dict[str, Any]) -> None:
    engine = Counting()
    settings = {"kv_share_ratio": 0.9, "prefill_lanes": 64, "max_num_seqs": 80}
    async with house_of(batch={"l": engine}, batch_settings=settings) as house:
        calls = [asyncio.create_task(house.post("/v1/completions", {"model": MODEL, **body})) for _ in range(12)]
        await until(lambda: engine.in_hand >= 1)
        engine.may_answer.set()
        answers = await asyncio.gather(*calls)

        assert {each.status_code for each in answers} == {200}
        assert engine.most_tokens <= 0.9 * 65_536
        assert engine.most_sequences <= 80


# -- memory ---------------------------------------------------------------------------------------------------------


async def silent(_: SeenRequest, connection: Connection) -> None:
    await connection.closed()


async def test_bodies_beyond_what_the_process_may_hold_are_a_429_until_others_are_done() -> None:
    server = {"body_max_bytes": MIB, "buffered_max_bytes": 3 * MIB}
    whole = json.dumps({**chat_body(), "x": "y" * (MIB - 500)}).encode()
    async with house_of(server=server, chat_settings={"max_num_seqs": 8}) as house:
        house.engines["c"].answering = silent
        holders = [await sent(house, request(CHAT, whole)) for _ in range(3)]
        await until(lambda: house.runtime.state.buffers.used_bytes > 2.9 * MIB)
        # Neither what comes whole nor what comes in pieces is taken, and nobody who is in is put out.
        refused = [await house.chat("x" * 5_000) for _ in range(3)]
        healthy = await house.get("/healthz")
        held = house.runtime.state.in_flight
        for holder in holders:
            await leave(holder, "close")
        await until(lambda: house.runtime.state.in_flight == 0)
        house.engines["c"].answering = says()
        served = await house.post(CHAT, whole)
        page = await house.metrics()

        assert {(each.status_code, each.json()["error"]["code"]) for each in refused} == {(429, "request_buffers_full")}
        assert {each.json()["error"]["type"] for each in refused} == {"rate_limit_error"}
        assert all(1 <= int(each.headers["retry-after"]) <= 60 for each in refused)
        assert (held, healthy.status_code, served.status_code) == (3, 200, 200)
        assert page.value("router_requests_total", outcome="refused_router_full") == 3


async def test_a_crowd_of_uploads_that_stop_half_way_costs_no_memory_for_what_did_not_come(house: House) -> None:
    head = request(CHAT, headers=["connection: close"]).replace(b"content-length: 0", b"content-length: 20000000")
    wires = [await sent(house, head + b'{"model":"' + b"x" * 10_000) for _ in range(20)]
    await until(lambda: house.runtime.state.in_flight == 20)
    await until(lambda: house.runtime.state.buffers.used_bytes >= 20 * 10_000)
    held = house.runtime.state.buffers.used_bytes

    for number, wire in enumerate(wires):
        await leave(wire, "reset" if number % 2 else "close")

    assert held < 20 * 20_000
    await until(lambda: house.runtime.state.in_flight == 0)
    assert house.engines["c"].calls == house.engines["l"].calls == []


def peak_bytes(router: RouterProcess) -> int:
    """The most memory that the process ever had."""
    status = Path(f"/proc/{router.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


async def test_a_large_image_costs_less_than_three_times_its_size(tmp_path: Path) -> None:
    size = 24 * MIB
    engine = CaseEngine()
    async with RawServer(engine.play) as c, RawServer(engine.play) as long:
        pools = {"chat": {"max_model_len": 4_096}, "batch": {"max_model_len": LONG_TOKENS}}
        config = write_config(tmp_path, {"c": c.url, "l": long.url}, models=[model_config(borrow=False, **pools)])
        async with router_process(config) as router:
            await router.client.post(CHAT, json=chat_body(max_tokens=2))
            before = peak_bytes(router)
            url = "data:image/png;base64," + "A" * size
            parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}]
            body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": parts}]}
            served = await router.client.post(CHAT, json=body)
            rise = peak_bytes(router) - before
            output = router.output

        assert served.status_code == 200
        assert len(engine.calls[-1].body) > size
        assert rise < 3 * size
        assert "Traceback" not in output
