import httpx
from tests.http.stack import Stack, Stage
def test_smoke(stage: Stage, stack: Stack) -> None:
    async def t():
        r = await stack.chat(max_tokens=5)
        print(r.status_code, dict(r.headers), r.text)
        async with stack.client.stream("POST","/v1/chat/completions",json={"model":"llama","messages":[{"role":"user","content":"hi"}],"max_tokens":3,"stream":True}) as s:
            print((await s.aread()).decode())
        m = await stack.metrics()
        print([x for x in m.text.splitlines() if x.startswith("router_requests_total")])
    stage.run(t())
