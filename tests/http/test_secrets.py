"""No key and no password is ever said: not in the log at debug, in an answer, in the metrics, or by `router check`."""

import asyncio
import json
import socket
import sys
from pathlib import Path

from tests.http.process import router_process
from tests.http.scripted import ScriptedEngine, says
from tests.http.setting import LONG_TOKENS, MODEL, chat_body, write_config
from tests.http.stack import new_client
from tests.http.wire import exchange, request
from tests.upstream.fakes import RawServer

SECRETS = {
    "CLIENT_KEY": "marker-client-key",
    "ENGINE_KEY": "marker-engine-key",
    "RELAY_KEY": "marker-relay-key",
    "REDIS_PASSWORD": "marker-redis-password",
    "PROXY_PASSWORD": "marker-proxy-password",
}
WRONG_KEY = "marker-wrong-key"
PROMPT = "marker-prompt-text"
ANSWER = "marker-answer-text"


def dead_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def config_of(folder: Path, c: str, long: str, x: str) -> Path:
    config = write_config(
        folder,
        {"c": c, "l": long},
        server={"host": "127.0.0.1", "data_dir": str(folder / "data"), "log_level": "debug"},
        redis={"url": f"redis://user:${{REDIS_PASSWORD}}@127.0.0.1:{dead_port()}/0", "socket_timeout_s": 0.2},
        keys=[{"name": "team", "key": "${CLIENT_KEY}"}],
        relays=[
            {
                "name": "x",
                "url": x,
                "api_key": "${RELAY_KEY}",
                "models": {MODEL: "other"},
                "classes": ["chat", "batch"],
            },
            {
                "name": "y",
                "url": "http://127.0.0.1:9",
                "models": {MODEL: "other"},
                "proxy": f"http://user:${{PROXY_PASSWORD}}@127.0.0.1:{dead_port()}",
            },
        ],
    )
    document = json.loads(config.read_text())
    for engine in document["engines"]:
        engine["api_key"] = "${ENGINE_KEY}"
    config.write_text(json.dumps(document))
    return config


async def test_no_secret_is_said_anywhere_whatever_goes_wrong(tmp_path: Path) -> None:
    echo = json.dumps({"error": {"message": f"wrong key: {SECRETS['ENGINE_KEY']} {SECRETS['RELAY_KEY']}"}}).encode()
    good = b'{"choices":[{"message":{"content":"%b"}}]}' % ANSWER.encode()
    engine, relay = ScriptedEngine(says(good), max_model_len=LONG_TOKENS), ScriptedEngine(says(echo, status=401))
    seen: list[str] = []
    async with RawServer(engine.play) as c, RawServer(engine.play) as long, RawServer(relay.play) as x:
        config = config_of(tmp_path, c.url, long.url, x.url)
        async with router_process(config, env=SECRETS, key=SECRETS["CLIENT_KEY"]) as router:
            client, path = router.client, "/v1/chat/completions"
            served = await client.post(path, json=chat_body(PROMPT))
            for status in (401, 403):
                engine.answering = says(echo, status=status)
                seen.append((await client.post(path, json=chat_body(PROMPT))).text)
            engine.answering = says(good)
            async with new_client(router.url, key=WRONG_KEY) as stranger:
                seen.append((await stranger.post(f"{path}?api_key={WRONG_KEY}", json=chat_body(PROMPT))).text)
            odd = (
                client.post(
                    f"{path}?key={SECRETS['CLIENT_KEY']}", content=b"{", headers={"content-type": "application/json"}
                ),
                client.post(path, json={**chat_body(), "api_key": WRONG_KEY, "n": "x"}),
                client.post("/v1/completions", json={"model": MODEL, "prompt": [1] * 3_000}),
                client.get("/readyz"),
                client.get("/metrics"),
                client.get("/v1/models"),
            )
            seen += [(await call).text for call in odd]
            odd_header = f"authorization: Bearer {WRONG_KEY}"
            seen.append((await exchange(router.port, request(path, headers=[odd_header, "bad header"]))).decode())
            output = router.output
            router.signal()
            code = await router.exit_code()
        output += router.output
        checks = [await check(config, *flags) for flags in ((), ("--json",))]

    assert (served.status_code, code) == (200, 0)
    assert len(relay.calls) >= 1
    said = "\n".join([*seen, *checks, output])
    assert [secret for secret in (*SECRETS.values(), WRONG_KEY) if secret in said] == []
    assert [words for words in (PROMPT, ANSWER) if words in output] == []


async def check(config: Path, *flags: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "check", "-c", str(config), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=SECRETS,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output
    return output.decode()
