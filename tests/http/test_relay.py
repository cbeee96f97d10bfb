"""The way out: the provider's own name for the model, our own key, and nobody else's choice of where."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from router.sim.faults import FaultKind, FaultRule, Faults
from tests.http.scripted import ScriptedEngine, says
from tests.http.setting import MODEL, RELAY_KEY, chat_body, model_config, outside_sim
from tests.http.stack import Stack, fresh, stack_of, until
from tests.http.stage import Stage
from tests.http.wire import exchange, request
from tests.upstream.fakes import Connection, RawServer, SeenRequest
from tests.upstream.fakes import answer as raw_answer

DOWN = Faults((FaultRule(kind=FaultKind.REFUSE_CONNECTIONS),))


async def take_down(stack: Stack) -> None:
    """Both engines refuse connections, and the router knows."""
    (service,) = stack.runtime.state.models
    for sim in (stack.c, stack.long):
        await sim.set_faults(DOWN)
    await until(lambda: not any(engine.status.can_serve for engine in service.flow.engines.values()))


@pytest.fixture(scope="module")
def dead_stack(stage: Stage) -> Stack:
    """Both engines are down; relay X takes chat and batch."""
    keys = [{"name": "team", "key": "client-key"}]
    stack = stage.start(stack_of(x=outside_sim(), relay={"classes": ["chat", "batch"]}, keys=keys))
    stage.run(take_down(stack))
    return stack


@pytest.fixture
def dead(stage: Stage, dead_stack: Stack) -> Iterator[Stack]:
    dead_stack.x.log.clear()
    yield dead_stack
    stage.run(dead_stack.check_at_rest())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat_body(max_tokens=3)),
        ("/v1/chat/completions", chat_body(max_tokens=3, stream=True)),
        ("/v1/chat/completions", {**chat_body(max_tokens=3), "model": "small"}),
        ("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 3}),
        ("/v1/completions", {"model": MODEL, "prompt": [1] * 3_000, "max_tokens": 3}),
        ("/v1/embeddings", {"model": MODEL, "input": "x"}),
    ],
)
async def test_a_relay_is_asked_for_its_own_name_of_the_model_with_our_key(
    dead: Stack, path: str, body: dict[str, Any]
) -> None:
    secret = {"x-secret": "client-secret", "x-api-key": "client-key", "openai-organization": "org-client"}

    answer = await dead.post(path + "?q=1", {**body, "priority": -5, "kv_transfer_params": {}}, headers=secret)

    assert answer.status_code == 200, answer.text
    (entry,) = dead.x.log.entries()
    forwarded = json.loads(entry.body)
    forwarded.pop("stream_options", None)
    assert forwarded == {**body, "model": "vendor/big-1"}
    assert entry.path == path
    assert entry.headers["authorization"] == f"Bearer {RELAY_KEY}"
    assert {"x-secret", "x-api-key", "openai-organization", "cookie"}.isdisjoint(entry.headers)
    assert answer.headers["x-router-relay"] == "x"
    assert "vendor/big-1" in answer.text
    page = await dead.metrics()
    assert page.value("router_relayed_total", relay="x") >= 1


async def test_a_stream_of_a_relay_has_no_usage_chunk_that_the_client_did_not_ask_for(dead: Stack) -> None:
    answer = await dead.chat(max_tokens=3, stream=True)

    assert "usage" not in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_without_a_name_for_the_model_no_relay_is_asked() -> None:
    ours, other = model_config(), model_config(name="other", aliases=[], served_model_name=MODEL)
    del ours["pools"]["batch"], other["pools"]["chat"], other["threshold_tokens"]
    relay = {"models": {"other": "vendor/x"}, "classes": ["chat", "batch"]}
    async with fresh(chats=False, x=outside_sim(), relay=relay, models=[ours, other]) as stack:
        for sim in (stack.c, stack.long):
            await sim.set_faults(DOWN)
        engines = [engine for service in stack.runtime.state.models for engine in service.flow.engines.values()]
        await until(lambda: not any(engine.status.can_serve for engine in engines))

        refused = await stack.chat(max_tokens=2)

        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_engine_available")
        assert refused.headers["retry-after"]
        assert stack.x.log.entries() == ()


async def test_classes_that_a_relay_may_not_take_stay_here() -> None:
    async with fresh(x=outside_sim(), relay={"classes": ["chat"]}) as stack:
        await take_down(stack)

        refused = await stack.post("/v1/completions", {"model": MODEL, "prompt": [1] * 3_000})
        served = await stack.chat(max_tokens=2)

        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_engine_available")
        assert served.status_code == 200


async def test_a_relays_refusal_of_our_key_or_bill_never_shows_its_words() -> None:
    said = json.dumps({"error": {"message": f"Incorrect API key provided: {RELAY_KEY}"}}).encode()
    relay = ScriptedEngine(says(said))
    async with fresh(chats=False, x=relay) as stack:
        await take_down(stack)

        for status in (401, 402, 403, 500):
            relay.answering = says(said, status=status)
            answer = await stack.chat(max_tokens=2)

            assert answer.status_code in (502, 503)
            assert RELAY_KEY not in answer.text
        assert len(relay.calls) == 4


# -- nobody else chooses the target ----------------------------------------------------------------------------------

TARGETS = {
    "api_base": "{url}/v1",
    "base_url": "{url}",
    "api_key": "stolen",
    "custom_llm_provider": "openai",
    "extra_body": {"api_base": "{url}", "metadata": {"base_url": "{url}"}},
    "metadata": {"base_url": "{url}"},
    "extra_headers": {"Host": "{url}"},
}


async def test_no_field_or_header_of_a_request_chooses_where_it_goes(stack: Stack) -> None:
    visitors: list[SeenRequest] = []

    async def visited(connection: Connection) -> None:
        request = await connection.request()
        if request is not None:
            visitors.append(request)

    async with RawServer(visited) as trap:
        fields = json.loads(json.dumps(TARGETS).replace("{url}", trap.url))
        image = [{"type": "image_url", "image_url": {"url": f"{trap.url}/latest/meta-data"}}]
        headers = {
            "x-backend": trap.url,
            "x-forwarded-host": trap.url,
            "x-router-engine": trap.url,
            "x-router-hop": "",
            "host": trap.url.removeprefix("http://"),
        }
        with_fields = await stack.chat(max_tokens=2, headers=headers, **fields)
        with_image = await stack.post(
            "/v1/chat/completions", {**chat_body(max_tokens=2), "messages": [{"role": "user", "content": image}]}
        )
        as_model = await stack.post("/v1/chat/completions", {**chat_body(), "model": trap.url})
        as_line = await exchange(
            stack.port, request(f"{trap.url}/v1/models", method="GET", headers=["connection: close"])
        )

        assert with_fields.status_code == 200
        assert with_image.status_code in (200, 400)
        assert as_model.status_code == 404
        assert as_line.startswith(b"HTTP/1.1 200")
        assert visitors == []
        assert stack.sent_for(with_fields).headers["host"] == stack.c.url.removeprefix("http://")


async def test_a_router_whose_relay_is_itself_refuses_its_own_request_at_once() -> None:
    async def forward(seen: SeenRequest, connection: Connection) -> None:
        """Relay X is the router: what it is sent comes back to the door."""
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.post(
                f"{stack.url}{seen.path}",
                content=seen.body.replace(b"vendor/big-1", b"llama"),
                headers=[(name, value) for name, value in seen.headers if name in ("content-type", "x-router-hop")],
            )
        await connection.send(raw_answer(answer.content, status=answer.status_code))

    relay = ScriptedEngine(forward)
    async with fresh(chats=False, x=relay) as stack:
        await take_down(stack)
        answers = [await stack.chat(max_tokens=2) for _ in range(3)]
        page = await stack.metrics()

        assert {answer.status_code for answer in answers} <= {429, 502, 503}
        assert len(relay.calls) <= 3 * 3
        assert page.value("router_relay_loops_total") >= 1
