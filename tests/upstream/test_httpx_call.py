"""What only a relay can have: a configured proxy."""

import pytest

from router.config.model import Secret
from router.upstream.api import UpstreamRequest
from router.upstream.httpx_call import HttpxUpstream

from .fakes import RawServer, SeenRequest, answer, read, run, serve

POST = UpstreamRequest("POST", "/v1/completions", ((b"content-type", b"application/json"),), b'{"a":1}')


def test_a_configured_proxy_is_asked_with_the_whole_url() -> None:
    seen: list[SeenRequest] = []

    def handler(request: SeenRequest) -> bytes:
        seen.append(request)
        return answer(b"{}")

    async def body() -> None:
        async with RawServer(serve(handler)) as proxy:
            it = HttpxUpstream("r", "http://relay.invalid/v1", api_key=None, proxy=Secret(proxy.url))
            response = await it.open(POST, connect_s=5, first_byte_s=5, idle_s=5)
            assert await read(response) == b"{}"
            await it.aclose()

            assert seen[0].path == "http://relay.invalid/v1/completions"

    run(body())


def test_a_socks_proxy_without_its_package_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^e: the proxy"):
        HttpxUpstream("e", "http://x", api_key=None, proxy=Secret("socks5://u:pw@127.0.0.1:1"))
