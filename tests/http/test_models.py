"""The list of models, and whether the router is ready: known without asking an engine."""

import asyncio

from router.sim.engine import EngineShape
from router.sim.faults import FaultKind, FaultRule, Faults
from tests.http.scripted import ScriptedEngine, says
from tests.http.setting import LONG_TOKENS, chat_body, long_sim, model_config
from tests.http.stack import Stack, fresh, stack_of, until
from tests.upstream.fakes import Connection

DOWN = Faults((FaultRule(kind=FaultKind.REFUSE_CONNECTIONS),))


async def test_models_are_listed_with_their_aliases_once_and_with_their_longest_context(stack: Stack) -> None:
    listed = (await stack.get("/v1/models")).json()

    assert listed["object"] == "list"
    assert [(card["id"], card["root"], card["max_model_len"]) for card in listed["data"]] == [
        ("llama", "llama", LONG_TOKENS),
        ("small", "llama", LONG_TOKENS),
    ]
    assert all(card["object"] == "model" and isinstance(card["created"], int) for card in listed["data"])
    text = str(listed)
    assert stack.c.url not in text
    assert "http" not in text


async def test_one_model_is_found_by_every_name_and_an_unknown_one_is_a_404(stack: Stack) -> None:
    by_name = await stack.get("/v1/models/llama")
    by_alias = await stack.get("/v1/models/small")
    unknown = await stack.get("/v1/models/none/of%2fthese")

    assert (by_name.json()["id"], by_alias.json()["id"]) == ("llama", "small")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_model_whose_name_has_slashes_is_found() -> None:
    models = [model_config(name="org/llama", aliases=["a/b/c"], served_model_name="llama")]
    async with fresh(chats=False, models=models) as stack:
        plain = await stack.get("/v1/models/org/llama")
        escaped = await stack.get("/v1/models/a%2Fb%2Fc")

        assert (plain.json()["id"], escaped.json()["id"]) == ("org/llama", "a/b/c")


async def test_an_alias_in_chinese_is_served_and_listed_like_any_other() -> None:
    models = [model_config(aliases=["通义千问"])]
    async with fresh(chats=False, models=models) as stack:
        answer = await stack.post("/v1/chat/completions", chat_body(model="通义千问", max_tokens=2))
        listed = await stack.get("/v1/models/通义千问")

        assert (answer.status_code, answer.headers["x-router-pool"]) == (200, "chat")
        assert listed.json()["id"] == "通义千问"


async def test_an_engine_that_serves_less_context_than_configured_shortens_the_list() -> None:
    short = long_sim(shape=EngineShape(max_model_len=8_192, max_num_seqs=4, kv_cache_tokens=65_536))
    async with fresh(long=short) as stack:
        listed = (await stack.get("/v1/models")).json()

        assert [card["max_model_len"] for card in listed["data"]] == [8_192, 8_192]


async def test_the_list_comes_at_once_with_an_engine_down_black_holed_or_talking_nonsense() -> None:
    class BlackHole(ScriptedEngine):
        async def play(self, connection: Connection) -> None:
            await connection.closed()

    class Nonsense(ScriptedEngine):
        async def play(self, connection: Connection) -> None:
            while await connection.request() is not None:
                await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{not json")

    for odd in (BlackHole(says()), Nonsense(says())):
        async with stack_of(long=odd, serving={"c"}) as stack:
            answers = await asyncio.gather(*(stack.get("/v1/models") for _ in range(25)))
            ready = await stack.get("/readyz")

            assert {answer.status_code for answer in answers} == {200}
            assert {answer.content for answer in answers} == {answers[0].content}
            assert ready.status_code == 200


async def test_the_router_is_ready_once_an_engine_serves_and_no_longer_than_one_does() -> None:
    async with stack_of(serving=set()) as stack:
        await until(lambda: next(iter(stack.runtime.state.models)).is_serving())
        ready = await stack.get("/readyz")
        for sim in (stack.c, stack.long):
            await sim.set_faults(DOWN)
        await until(lambda: not next(iter(stack.runtime.state.models)).is_serving())
        down = await stack.get("/readyz")
        alive = await stack.get("/healthz")

        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert (down.status_code, down.json()["status"]) == (503, "no engine serves")
        assert down.headers["retry-after"]
        assert alive.status_code == 200
        assert stack.c.url not in down.text


async def test_a_router_starts_with_every_engine_down_and_says_so() -> None:
    down = long_sim(faults=DOWN)
    async with stack_of(c=down, long=down, serving=set()) as stack:
        ready = await stack.get("/readyz")
        refused = await stack.chat()

        assert (ready.status_code, refused.status_code) == (503, 503)
        assert refused.json()["error"]["code"] == "no_engine_available"
        assert refused.headers["retry-after"]
