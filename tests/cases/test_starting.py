"""What a router says when it starts, and what it leaves alone."""

from pathlib import Path

from tests.cases.house import CaseEngine
from tests.http.process import router_process
from tests.http.setting import MODEL, chat_body, model_config, write_config
from tests.upstream.fakes import RawServer

PROXIES = {"HTTP_PROXY": "http://user:marker@127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": "localhost"}


async def test_proxies_of_the_environment_are_told_to_be_ignored_without_their_password(tmp_path: Path) -> None:
    engine, relay = CaseEngine(), CaseEngine()
    async with RawServer(engine.play) as c, RawServer(engine.play) as long, RawServer(relay.play) as x:
        relays = [{"name": "x", "url": x.url, "api_key": "k", "models": {MODEL: MODEL}}]
        config = write_config(tmp_path, {"c": c.url, "l": long.url}, relays=relays, models=[model_config(borrow=False)])
        async with router_process(config, env=PROXIES) as router:
            served = await router.client.post("/v1/chat/completions", json=chat_body(max_tokens=2))
            output = router.output

    assert served.status_code == 200
    assert output.count("HTTP_PROXY, ALL_PROXY ignored") == 1
    assert "marker" not in output
