"""Too much work: bounded queues, refusals with a time to come back, and nothing run for those who left."""

import asyncio
import socket
import time
from typing import Any

import httpx
import openai
import pytest

from router.sim.faults import FaultKind, FaultRule, Faults
from router.sim.presets import preset
from tests.http.scripted import ScriptedEngine, says
from tests.http.setting import chat_body, chat_sim, long_sim, model_config, outside_sim
from tests.http.stack import Stack, fresh, new_client, stack_of, until
from tests.upstream.fakes import Connection, SeenRequest

#: Long enough for the batch pool, short enough to count at once.
LONG_PROMPT = {"model": "llama", "prompt": [1] * 2_000, "max_tokens": 8}
SILENT = Faults((FaultRule(kind=FaultKind.SILENT),))
DOWN = Faults((FaultRule(kind=FaultKind.REFUSE_CONNECTIONS),))


def is_whole_seconds(answer: httpx.Response) -> bool:
    value = answer.headers["retry-after"]
    return value.isdigit() and 1 <= int(value) <= 60


async def held_at(stack: Stack, engine: str, body: dict[str, Any], path: str) -> asyncio.Task[httpx.Response]:
    """A request that an engine has and does not answer."""
    before = len(stack.entries(engine))
    call = asyncio.create_task(stack.post(path, body))
    await until(lambda: len(stack.entries(engine)) > before)
    return call


async def leave(*calls: asyncio.Task[Any]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


ONE_SEAT = {"max_num_seqs": 1}


async def test_a_full_chat_pool_is_a_429_and_a_dead_one_a_503_each_with_its_own_code_and_time() -> None:
    impatient = {**ONE_SEAT, "ttft_target_s": 0.1}
    async with fresh(chats=False, models=[model_config(chat=impatient, borrow=False)]) as stack:
        await stack.c.set_faults(SILENT)
        holder = await held_at(stack, "c", chat_body(), "/v1/chat/completions")
        full = [await stack.chat() for _ in range(3)]
        await leave(holder)
        await stack.c.set_faults(DOWN)
        await until(lambda: not _engine(stack, "c").status.can_serve)
        dead = await stack.chat()

        assert {answer.status_code for answer in full} == {429}
        assert {answer.json()["error"]["code"] for answer in full} == {"chat_pool_full"}
        assert {answer.json()["error"]["type"] for answer in full} == {"rate_limit_error"}
        assert all(is_whole_seconds(answer) for answer in full)
        assert (dead.status_code, dead.json()["error"]["code"]) == (503, "no_engine_available")
        assert is_whole_seconds(dead)


def _engine(stack: Stack, name: str) -> Any:
    return next(
        flow.engines[name] for flow in (service.flow for service in stack.runtime.state.models) if name in flow.engines
    )


async def test_a_full_batch_queue_is_a_429_and_takes_the_next_once_one_has_left() -> None:
    batch = {**ONE_SEAT, "queue_max_requests": 2}
    async with fresh(models=[model_config(batch=batch)]) as stack:
        await stack.long.set_faults(SILENT)
        holder = await held_at(stack, "l", LONG_PROMPT, "/v1/completions")
        waiters = [asyncio.create_task(stack.post("/v1/completions", LONG_PROMPT)) for _ in range(2)]
        line = next(iter(stack.runtime.state.models)).flow.line
        assert line is not None
        await until(lambda: len(line._waiters) == 2 and all(waiter.ticket.seq for waiter in line._waiters.values()))

        refused = await stack.post("/v1/completions", LONG_PROMPT)
        await stack.long.set_faults(Faults())
        await leave(holder)
        served = await asyncio.gather(*waiters)
        later = await stack.post("/v1/completions", LONG_PROMPT)

        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "batch_queue_full")
        assert is_whole_seconds(refused)
        assert {answer.status_code for answer in (*served, later)} == {200}
        assert all(int(answer.headers["x-router-queue-wait-ms"]) > 0 for answer in served)


async def test_refusals_are_spread_so_that_clients_do_not_come_back_together() -> None:
    impatient = {**ONE_SEAT, "ttft_target_s": 0.01}
    async with fresh(models=[model_config(chat=impatient, borrow=False)]) as stack:
        await stack.c.set_faults(SILENT)
        holder = await held_at(stack, "c", chat_body(max_tokens=900), "/v1/chat/completions")
        full = await asyncio.gather(*(stack.chat(max_tokens=900) for _ in range(40)))
        await leave(holder)
        await stack.c.set_faults(Faults())

        times = {int(answer.headers["retry-after"]) for answer in full}
        assert {answer.status_code for answer in full} == {429}
        assert len(times) > 1


async def test_a_relays_own_time_to_come_back_is_passed_on_and_the_clients_retry_succeeds() -> None:
    relay = outside_sim(rate_limited_requests=1, retry_after_s=7)
    async with fresh(x=relay, models=[model_config()]) as stack:
        for sim in (stack.c, stack.long):
            await sim.set_faults(DOWN)
        await until(lambda: not any(_engine(stack, name).status.can_serve for name in "cl"))

        refused = await stack.chat(max_tokens=2)
        again = await stack.chat(max_tokens=2)

        assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
        assert again.status_code == 200
        assert again.headers["x-router-relay"] == "x"


async def test_the_openai_clients_own_retry_is_served_once_there_is_room() -> None:
    impatient = {**ONE_SEAT, "ttft_target_s": 0.1}
    async with fresh(models=[model_config(chat=impatient, borrow=False)]) as stack:
        await stack.c.set_faults(SILENT)
        holder = await held_at(stack, "c", chat_body(), "/v1/chat/completions")
        refusals = 0

        async def make_room(response: httpx.Response) -> None:
            nonlocal refusals
            if response.status_code == 429:
                refusals += 1
                response.headers["retry-after-ms"] = "1"
                await stack.c.set_faults(Faults())
                await leave(holder)

        own: Any = httpx.AsyncClient(trust_env=False, event_hooks={"response": [make_room]})
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x", http_client=own) as client:
            completion = await client.chat.completions.create(
                model="llama", messages=[{"role": "user", "content": "x"}], max_tokens=3
            )

        assert refusals == 1
        assert completion.choices[0].message.content


async def test_a_queue_stays_at_its_bound_the_rest_is_refused_and_who_left_is_never_run() -> None:
    """Three hundred chats at once on one seat, and clients that give up."""
    bounded = {**ONE_SEAT, "hold_max_requests": 20, "ttft_target_s": 100.0}
    async with fresh(models=[model_config(chat=bounded, borrow=False)]) as stack:
        await stack.c.set_faults(SILENT)
        holder = await held_at(stack, "c", chat_body("holder"), "/v1/chat/completions")
        gate = next(iter(stack.runtime.state.models)).flow.gate
        most_held = 0
        async with new_client(stack.url, limits=httpx.Limits(max_connections=300)) as client:
            calls = [
                asyncio.create_task(client.post("/v1/chat/completions", json=chat_body(f"left {number}")))
                for number in range(300)
            ]
            while sum(call.done() for call in calls) < 280:
                most_held = max(most_held, gate.snapshot().held_requests)
                await asyncio.sleep(0.002)
            answered = [call.result() for call in calls if call.done()]
            probe_started_s = time.monotonic()
            healthy = await stack.get("/healthz")
            probe_s = time.monotonic() - probe_started_s
            await leave(*(call for call in calls if not call.done()))
        await until(lambda: gate.snapshot().held_requests == 0)
        await stack.c.set_faults(Faults())
        await leave(holder)
        page = await stack.metrics()

        assert most_held == 20
        assert [answer.status_code for answer in answered] == [429] * 280
        assert all(is_whole_seconds(answer) for answer in answered)
        assert healthy.status_code == 200
        assert probe_s < 5.0
        assert [entry.body for entry in stack.entries("c") if b"left" in entry.body] == []
        assert page.value("router_requests_total", outcome="client_left_waiting") == 20


async def test_more_connections_than_allowed_are_refused_in_the_standard_shape_and_probes_still_answered() -> None:
    async def silent(_: SeenRequest, connection: Connection) -> None:
        await connection.closed()

    engine = ScriptedEngine(silent)
    async with fresh(c=engine, server={"connections_max": 8}, models=[model_config(borrow=False)]) as stack:
        async with new_client(stack.url) as client:
            calls = [
                asyncio.create_task(client.post("/v1/chat/completions", json=chat_body(stream=True))) for _ in range(8)
            ]
            await until(lambda: len(engine.calls) == 8)
            async with new_client(stack.url) as other:
                refused = await other.post("/v1/chat/completions", json=chat_body())
                probes = [await other.get(path) for path in ("/healthz", "/readyz", "/metrics")]
            await leave(*calls)
        engine.answering = says()

        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
        assert is_whole_seconds(refused)
        assert [probe.status_code for probe in probes] == [200, 200, 200]


@pytest.mark.parametrize("hint", ["chat", "batch", None])
async def test_long_prompts_never_reach_the_chat_engine_nor_hold_up_short_chats(hint: str | None) -> None:
    """Twenty prompts of 8,000 tokens beside short chats; on engine L each takes a while."""
    slow = long_sim(preset=preset("tiny-demo"), time_scale=0.3)
    headers = {} if hint is None else {"x-router-class": hint}
    body = {"model": "llama", "prompt": [1] * 8_000, "max_tokens": 2}
    async with fresh(long=slow, c=chat_sim(), models=[model_config(borrow=False)]) as stack:
        long = [asyncio.create_task(stack.post("/v1/completions", body, headers=headers)) for _ in range(20)]
        await until(lambda: len(stack.entries("l")) >= 1)
        done_before = sum(call.done() for call in long)
        chats = [await stack.chat(f"short {number}", max_tokens=2, stream=True) for number in range(30)]
        done_after = sum(call.done() for call in long)
        answers = await asyncio.gather(*long)

        assert {answer.status_code for answer in (*chats, *answers)} == {200}
        assert {answer.headers["x-router-engine"] for answer in chats} == {"c"}
        assert {answer.headers["x-router-engine"] for answer in answers} == {"l"}
        # All thirty chats were answered while long ones still waited.
        assert done_before <= done_after < 20
        if hint == "chat":
            assert {answer.headers["x-router-reason"] for answer in answers} == {"hint_does_not_fit"}


async def test_a_prefill_longer_than_any_default_timeout_is_waited_for() -> None:
    """Scaled: the first token comes long after the chat pool's limit, within the batch pool's own."""
    batch = {"timeouts": {"first_byte_s": 20.0, "idle_s": 0.5}}
    chat = {"timeouts": {"first_byte_s": 0.2}}
    slow = long_sim(faults=Faults((FaultRule(kind=FaultKind.FIRST_TOKEN_DELAY, value=0.6, after_requests=1),)))
    async with fresh(long=slow, models=[model_config(chat=chat, batch=batch, commit_after_s=0.3)]) as stack:
        body = {"model": "llama", "prompt": [1] * 4_000, "max_tokens": 4}
        streamed, whole = await asyncio.gather(
            stack.post("/v1/completions", {**body, "stream": True}), stack.post("/v1/completions", body)
        )

        assert (streamed.status_code, whole.status_code) == (200, 200)
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert len(stack.entries("l")) == 2


async def test_without_the_queues_store_batch_is_a_503_with_a_time_and_chat_goes_on() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        redis = {"url": f"redis://127.0.0.1:{taken.getsockname()[1]}/0", "socket_timeout_s": 0.1}
        async with stack_of(redis=redis) as stack:
            refused = await stack.post("/v1/completions", LONG_PROMPT)
            served = await stack.chat(max_tokens=2)

            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "batch_queue_unavailable")
            assert is_whole_seconds(refused)
            assert served.status_code == 200
