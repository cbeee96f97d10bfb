"""HTTP to one engine: what is sent, what comes back, and what every kind of failure is called."""

import asyncio
import gzip
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.config.model import Secret
from router.errors import ApiError
from router.upstream import connection
from router.upstream.api import ConnectFailed, UpstreamError, UpstreamLost, UpstreamRequest, UpstreamTimeout
from router.upstream.connection import ConnectionsBusy, HttpxResponse, HttpxUpstream

from .fakes import STREAM_HEAD, Connection, RawServer, SeenRequest, answer, piece, run, serve

GET = UpstreamRequest("GET", "/health")
POST = UpstreamRequest("POST", "/v1/completions", (("content-type", "application/json"),), b'{"a":1}')


@asynccontextmanager
async def upstream(url: str, **options: object) -> AsyncIterator[HttpxUpstream]:
    it = HttpxUpstream("e", url, api_key=None, **options)  # type: ignore[arg-type]  # a test's keyword options
    try:
        yield it
    finally:
        await it.aclose()
        assert not it._closing


async def open_(
    it: HttpxUpstream,
    request: UpstreamRequest = GET,
    *,
    connect_s: float = 5,
    first_byte_s: float = 5,
    idle_s: float = 5,
) -> HttpxResponse:
    return await it.open(request, connect_s=connect_s, first_byte_s=first_byte_s, idle_s=idle_s)


async def read(response: HttpxResponse) -> bytes:
    try:
        return b"".join([chunk async for chunk in response.chunks()])
    finally:
        await response.aclose()


async def exhaust(chunks: AsyncIterator[bytes]) -> None:
    async for _ in chunks:
        pass


def refused_url() -> str:
    """A port that nobody listens on: bound and released."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_an_answer_comes_back_with_status_headers_and_bytes() -> None:
    async def body() -> None:
        said = answer(b"{}", status=207, headers="X-Odd: 1\r\n")
        async with RawServer(serve(lambda _: said)) as server, upstream(server.url) as it:
            response = await open_(it, POST)

            assert (response.status, response.headers["x-odd"]) == (207, "1")
            assert await read(response) == b"{}"

    run(body())


def test_fifty_requests_run_over_one_kept_connection() -> None:
    async def body() -> None:
        async with RawServer(serve(lambda _: answer(b"{}"))) as server, upstream(server.url) as it:
            for number in range(50):
                await read(await open_(it, POST if number % 2 else GET))

            assert server.connections == 1

    run(body())


def test_connections_that_nobody_uses_any_more_are_closed_without_a_further_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "KEEPALIVE_EXPIRY_S", 0.01)
    gone = asyncio.Semaphore(0)

    async def script(served: Connection) -> None:
        await serve(lambda _: answer(b"{}"))(served)
        gone.release()

    async def body() -> None:
        async with RawServer(script) as server, upstream(server.url) as it:
            responses = [await open_(it) for _ in range(5)]
            for response in responses:
                await read(response)

            for _ in range(5):
                await gone.acquire()

            assert (server.connections, len(it._idle)) == (5, 0)
            assert await read(await open_(it)) == b"{}"

    run(body())


def test_an_upstream_that_is_closed_comes_back_for_nothing() -> None:
    async def body() -> None:
        async with RawServer(serve(lambda _: answer(b"{}"))) as server, upstream(server.url) as it:
            await read(await open_(it))
            timer = it._expiry

            await it.aclose()

            assert timer is not None
            assert timer.cancelled()
            assert (it._expiry, len(it._idle)) == (None, 0)

    run(body())


def test_only_what_may_be_forwarded_reaches_the_engine() -> None:
    seen: list[SeenRequest] = []

    def handler(request: SeenRequest) -> bytes:
        seen.append(request)
        return answer(b"{}")

    headers = (
        ("connection", "close, X-Drop"),
        ("x-drop", "1"),
        ("te", "trailers"),
        ("upgrade", "h2c"),
        ("keep-alive", "timeout=5"),
        ("transfer-encoding", "chunked"),
        ("proxy-authorization", "Basic x"),
        ("host", "evil.test"),
        ("content-length", "999"),
        ("authorization", "Bearer of-the-client"),
        ("x-api-key", "of-the-client"),
        ("cookie", "a=b"),
        ("accept-encoding", "gzip"),
        ("expect", "100-continue"),
        ("x-team", "Größe"),
        ("x-cjk", "模型"),
        ("x-break", "a\r\nx-evil: 1"),
        ("bad name", "1"),
        ("x-kept", "yes"),
    )

    async def body() -> None:
        async with RawServer(serve(handler)) as server:
            it = HttpxUpstream("e", server.url, api_key=Secret("own-key"))
            await read(await open_(it, UpstreamRequest("POST", "/v1/x?q=a%2Fb&r=ü", headers, b"12345")))
            await it.aclose()

            assert sorted(seen[0].headers) == [
                ("accept-encoding", "identity"),
                ("authorization", "Bearer own-key"),
                ("content-length", "5"),
                ("host", f"127.0.0.1:{server.port}"),
                ("x-kept", "yes"),
                ("x-team", "Größe"),
            ]
            assert seen[0].path == "/v1/x?q=a%2Fb&r=%C3%BC"
            assert seen[0].body == b"12345"

    run(body())


def test_answer_headers_lose_hop_by_hop_fields_and_cookies_and_keep_odd_bytes() -> None:
    raw = (
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
        b"Set-Cookie: a=b\r\nX-Odd: \x80\xff\r\nVary: A\r\nVary: B\r\ncontent-length: 0\r\n\r\n"
    )

    async def body() -> None:
        async with RawServer(serve(lambda _: raw)) as server, upstream(server.url) as it:
            response = await open_(it)
            await response.aclose()

            assert response.headers == {"x-odd": "\x80\xff", "vary": "A, B", "content-length": "0"}

    run(body())


def test_a_compressed_answer_passes_undecoded_with_its_own_length() -> None:
    packed = gzip.compress(b'{"a":1}')
    headers = "content-encoding: gzip\r\n"

    async def body() -> None:
        async with RawServer(serve(lambda _: answer(packed, headers=headers))) as server, upstream(server.url) as it:
            response = await open_(it)

            assert response.headers["content-length"] == str(len(packed))
            assert await read(response) == packed

    run(body())


def test_head_204_and_an_answer_that_ends_by_closing_are_read() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        await connection.request()
        await connection.send(b"HTTP/1.1 204 No Content\r\n\r\n")
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\nto the end")

    async def body() -> None:
        async with RawServer(script) as server, upstream(server.url) as it:
            assert await read(await open_(it, UpstreamRequest("HEAD", "/"))) == b""
            assert await read(await open_(it)) == b""
            assert await read(await open_(it)) == b"to the end"

    run(body())


def test_a_redirect_is_an_answer_like_any_other() -> None:
    async def body() -> None:
        said = answer(b"", status=307, headers="location: http://192.0.2.1/\r\n")
        async with RawServer(serve(lambda _: said)) as server, upstream(server.url) as it:
            response = await open_(it, POST)
            await response.aclose()

            assert response.status == 307

    run(body())


def test_proxy_variables_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setitem(os.environ, name, "socks5://127.0.0.1:1")

    async def body() -> None:
        async with RawServer(serve(lambda _: answer(b"{}"))) as server, upstream(server.url) as it:
            assert await read(await open_(it)) == b"{}"

    run(body())


def test_a_configured_proxy_is_asked_with_the_whole_url() -> None:
    seen: list[SeenRequest] = []

    def handler(request: SeenRequest) -> bytes:
        seen.append(request)
        return answer(b"{}")

    async def body() -> None:
        async with RawServer(serve(handler)) as proxy:
            async with upstream("http://relay.invalid/v1", proxy=Secret(proxy.url)) as it:
                assert await read(await open_(it, POST)) == b"{}"

            assert seen[0].path == "http://relay.invalid/v1/completions"

    run(body())


def test_a_refused_connection_is_one_that_failed_to_connect() -> None:
    async def body() -> None:
        async with upstream(refused_url()) as it:
            with pytest.raises(ConnectFailed) as caught:
                await open_(it, POST)

            assert not isinstance(caught.value, ConnectionsBusy)

    run(body())


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncont", b"garbage\r\n\r\n"])
def test_a_connection_lost_before_the_headers_is_no_failure_to_connect(sent: bytes) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(sent)
        connection.reset()

    async def body() -> None:
        async with RawServer(script) as server, upstream(server.url) as it:
            with pytest.raises(UpstreamLost) as caught:
                await open_(it, POST)

            assert str(caught.value)

    run(body())


@pytest.mark.parametrize("cut", [b"4\r\nab", piece(b"abcd")])
def test_a_connection_lost_amid_the_body_is_lost_after_what_came(cut: bytes) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + piece(b"first") + cut)
        connection.writer.close()

    async def body() -> None:
        async with RawServer(script) as server, upstream(server.url) as it:
            response = await open_(it, POST)
            chunks = response.chunks()
            first = await anext(chunks)
            with pytest.raises(UpstreamLost):
                await exhaust(chunks)
            await response.aclose()

            assert first.startswith(b"first")
            assert it._places._value == 512

    run(body())


def test_a_server_that_closed_its_kept_connection_costs_nothing() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(answer(b"{}"))

    async def body() -> None:
        async with RawServer(script) as server, upstream(server.url) as it:
            for _ in range(5):
                assert await read(await open_(it, POST)) == b"{}"
                # Let the server's close arrive, as it has long before vLLM's next request.
                while server._tasks:
                    await asyncio.sleep(0)

            assert server.connections == 5

    run(body())


@pytest.mark.parametrize("head", [b"", STREAM_HEAD], ids=["no-headers", "headers-before-the-prefill"])
def test_silence_before_the_first_byte_of_the_body_ends_at_the_first_byte_limit(head: bytes) -> None:
    gone = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(head)
        await connection.closed()
        gone.set()

    async def body() -> None:
        async with RawServer(script) as server, upstream(server.url) as it:
            with pytest.raises(UpstreamTimeout) as caught:
                await read(await open_(it, POST, first_byte_s=0.05, idle_s=30))
            await gone.wait()

            assert caught.value.phase == "first_byte"
            assert caught.value.limit_s == 0.05
            assert it._places._value == 512

    run(body())


def test_a_long_prefill_is_not_cut_by_the_idle_limit() -> None:
    prefilled = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD)
        await prefilled.wait()
        await connection.send(piece(b"token") + piece(b""))

    async def body() -> None:
        async with RawServer(script) as server, upstream(server.url) as it:
            response = await open_(it, POST, first_byte_s=10, idle_s=0.05)
            # Longer than the idle limit by the loop's own clock.
            asyncio.get_running_loop().call_later(0.1, prefilled.set)

            assert await read(response) == b"token"

    run(body())


def test_silence_amid_the_body_ends_at_the_idle_limit() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + piece(b"token"))
        await connection.closed()

    async def body() -> None:
        async with RawServer(script) as server, upstream(server.url) as it:
            with pytest.raises(UpstreamTimeout) as caught:
                await read(await open_(it, POST, first_byte_s=30, idle_s=0.05))

            assert caught.value.phase == "idle"

    run(body())


def test_an_answer_left_unread_closes_its_socket() -> None:
    async def body() -> None:
        left = asyncio.Semaphore(0)

        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(STREAM_HEAD + piece(b"a") + piece(b"b"))
            await connection.closed()
            left.release()

        async with RawServer(script) as server, upstream(server.url) as it:
            for number in range(40):
                response = await open_(it, POST)
                if number % 2:
                    async for _ in response.chunks():
                        break
                await response.aclose()
                await response.aclose()
                await left.acquire()

            assert it._places._value == 512

    run(body())


@pytest.mark.parametrize("phase", ["open", "read"])
def test_a_cancelled_caller_closes_the_socket_too(phase: str) -> None:
    async def body() -> None:
        left = asyncio.Event()
        asked = asyncio.Event()

        async def script(connection: Connection) -> None:
            await connection.request()
            if phase == "read":
                await connection.send(STREAM_HEAD + piece(b"a"))
            asked.set()
            await connection.closed()
            left.set()

        async def call(it: HttpxUpstream) -> None:
            response = await open_(it, POST)
            try:
                async for _ in response.chunks():
                    pass
            finally:
                await response.aclose()

        async with RawServer(script) as server, upstream(server.url) as it:
            task = asyncio.create_task(call(it))
            await asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await left.wait()

            assert it._places._value == 512

    run(body())


def test_a_caller_cancelled_at_any_step_leaves_no_connection_behind() -> None:
    async def script(connection: Connection) -> None:
        while await connection.request() is not None:
            await connection.send(STREAM_HEAD + piece(b"a"))
            await connection.send(piece(b""))

    async def call(it: HttpxUpstream) -> None:
        response = await open_(it, POST)
        try:
            await exhaust(response.chunks())
        finally:
            await response.aclose()

    async def body() -> None:
        async with RawServer(script) as server:
            steps, untouched = 0, False
            while not untouched:
                async with upstream(server.url) as it:
                    task = asyncio.create_task(call(it))
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    untouched = not task.cancelled()
                    assert not it._busy
                    assert it._places._value == 512
                steps += 1 + steps // 20
            # Bounded by the guard of `run`: a connection left open would keep its script waiting.
            while server._tasks:
                await asyncio.sleep(0)

    run(body())


def test_a_silent_engine_takes_no_place_of_another() -> None:
    async def silent(connection: Connection) -> None:
        await connection.closed()

    async def body() -> None:
        async with (
            RawServer(silent) as first,
            RawServer(serve(lambda _: answer(b"{}"))) as second,
            upstream(first.url, connections_max=3) as stuck,
            upstream(second.url) as healthy,
        ):
            tasks = [asyncio.create_task(open_(stuck, POST, first_byte_s=20)) for _ in range(3)]
            while first.connections < 3:
                await asyncio.sleep(0)
            with pytest.raises(ConnectionsBusy):
                await open_(stuck, POST, connect_s=0.01)
            for _ in range(20):
                assert await read(await open_(healthy)) == b"{}"
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

            assert stuck._places._value == 3

    run(body())


def test_closing_the_upstream_ends_what_is_open() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + piece(b"a"))
        await connection.closed()

    async def body() -> None:
        async with RawServer(script) as server, upstream(server.url) as it:
            response = await open_(it, POST)
            chunks = response.chunks()
            assert await anext(chunks) == b"a"
            await it.aclose()
            await it.aclose()

            with pytest.raises(UpstreamError):
                await anext(chunks)
            await response.aclose()

    run(body())


def test_a_unix_socket_is_an_engine_too(tmp_path: object) -> None:
    async def body() -> None:
        path = f"{tmp_path}/e.sock"

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await Connection(reader, writer, 1).request()
            writer.write(answer(b"{}"))
            writer.close()

        server = await asyncio.start_unix_server(accept, path)
        async with upstream(f"unix://{path}") as it:
            assert await read(await open_(it)) == b"{}"
        server.close()
        await server.wait_closed()

    run(body())


@pytest.mark.parametrize(
    "url", ["ftp://x", "127.0.0.1:8000", "http://", "http://user:pw@x", "http://x/?a=1", "http://x:port"]
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"^e: ") as caught:
        HttpxUpstream("e", url, api_key=None)

    assert "pw" not in str(caught.value)


def test_a_socks_proxy_without_its_package_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^e: the proxy"):
        HttpxUpstream("e", "http://x", api_key=None, proxy=Secret("socks5://u:pw@127.0.0.1:1"))


def test_a_path_too_long_for_a_url_is_the_clients_mistake() -> None:
    async def body() -> None:
        async with upstream("http://127.0.0.1:1") as it:
            with pytest.raises(ApiError) as caught:
                await open_(it, UpstreamRequest("GET", "/?" + "x" * 100_000))

            assert caught.value.status == 400

    run(body())
