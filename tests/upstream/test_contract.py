"""HTTP to an engine or a relay: what is sent, what comes back, and what every kind of failure is called."""

import asyncio
import gzip
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.config.model import Secret
from router.errors import ApiError
from router.upstream import connection, httpx_call
from router.upstream.api import (
    ConnectFailed,
    ConnectionsBusy,
    UpstreamError,
    UpstreamLost,
    UpstreamRequest,
    UpstreamResponse,
    UpstreamTimeout,
)
from router.upstream.connection import EngineUpstream
from router.upstream.httpx_call import HttpxUpstream

from .fakes import STREAM_HEAD, Connection, RawServer, SeenRequest, answer, piece, read, rest_of, run, serve

pytestmark = pytest.mark.usefixtures("each_loop")

GET = UpstreamRequest("GET", "/health")
POST = UpstreamRequest("POST", "/v1/completions", ((b"content-type", b"application/json"),), b'{"a":1}')


Kind = type[EngineUpstream] | type[HttpxUpstream]


@pytest.fixture(params=[EngineUpstream, HttpxUpstream], ids=["engine", "relay"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Every test here holds for both."""
    it: Kind = request.param
    return it


@asynccontextmanager
async def upstream(kind: Kind, url: str, **options: object) -> AsyncIterator[EngineUpstream | HttpxUpstream]:
    it = kind("e", url, api_key=None, **options)  # type: ignore[arg-type]  # a test's keyword options
    places = free_places(it)
    try:
        yield it
    finally:
        await it.aclose()
        await at_rest(it, places)


async def at_rest(it: EngineUpstream | HttpxUpstream, places: int = 512) -> None:
    """Returns once nothing is in use or being closed."""
    while it._busy or free_places(it) != places:
        await asyncio.sleep(0)


def free_places(it: EngineUpstream | HttpxUpstream) -> int:
    return it._places_free if isinstance(it, EngineUpstream) else it._places._value


async def open_(
    it: EngineUpstream | HttpxUpstream,
    request: UpstreamRequest = GET,
    *,
    connect_s: float = 5,
    first_byte_s: float = 5,
    idle_s: float = 5,
) -> UpstreamResponse:
    return await it.open(request, connect_s=connect_s, first_byte_s=first_byte_s, idle_s=idle_s)


def refused_url() -> str:
    """A port that nobody listens on: bound and released."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_an_answer_comes_back_with_status_headers_and_bytes(kind: Kind) -> None:
    async def body() -> None:
        said = answer(b"{}", status=207, headers="X-Odd: 1\r\n")
        async with RawServer(serve(lambda _: said)) as server, upstream(kind, server.url) as it:
            response = await open_(it, POST)

            assert (response.status, response.header(b"x-odd")) == (207, b"1")
            assert await read(response) == b"{}"

    run(body())


def test_fifty_requests_run_over_one_kept_connection(kind: Kind) -> None:
    async def body() -> None:
        async with RawServer(serve(lambda _: answer(b"{}"))) as server, upstream(kind, server.url) as it:
            for number in range(50):
                await read(await open_(it, POST if number % 2 else GET))

            assert server.connections == 1

    run(body())


def test_connections_that_nobody_uses_any_more_are_closed_without_a_further_call(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (connection, httpx_call):
        monkeypatch.setattr(module, "KEEPALIVE_EXPIRY_S", 0.01)
    gone = asyncio.Semaphore(0)

    async def script(served: Connection) -> None:
        await serve(lambda _: answer(b"{}"))(served)
        gone.release()

    async def body() -> None:
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            for response in await asyncio.gather(*(open_(it) for _ in range(5))):
                await read(response)

            for _ in range(5):
                await gone.acquire()

            assert (server.connections, len(it._idle)) == (5, 0)
            assert await read(await open_(it)) == b"{}"

    run(body())


def test_an_upstream_that_is_closed_comes_back_for_nothing(kind: Kind) -> None:
    async def body() -> None:
        async with RawServer(serve(lambda _: answer(b"{}"))) as server, upstream(kind, server.url) as it:
            await read(await open_(it))
            timer = it._expiry

            await it.aclose()

            assert timer is not None
            assert timer.cancelled()
            assert (it._expiry, len(it._idle)) == (None, 0)

    run(body())


def test_only_what_may_be_forwarded_reaches_the_engine(kind: Kind) -> None:
    seen: list[SeenRequest] = []

    def handler(request: SeenRequest) -> bytes:
        seen.append(request)
        return answer(b"{}")

    headers = (
        (b"connection", b"close, X-Drop"),
        (b"x-drop", b"1"),
        (b"te", b"trailers"),
        (b"upgrade", b"h2c"),
        (b"keep-alive", b"timeout=5"),
        (b"transfer-encoding", b"chunked"),
        (b"proxy-authorization", b"Basic x"),
        (b"host", b"evil.test"),
        (b"content-length", b"999"),
        (b"authorization", b"Bearer of-the-client"),
        (b"x-api-key", b"of-the-client"),
        (b"cookie", b"a=b"),
        (b"accept-encoding", b"gzip"),
        (b"expect", b"100-continue"),
        (b"x-team", "Größe".encode("latin-1")),
        (b"x-cjk", "模型".encode()),
        (b"x-break", b"a\r\nx-evil: 1"),
        (b"bad name", b"1"),
        (b"x-kept", b"yes"),
    )

    async def body() -> None:
        async with RawServer(serve(handler)) as server:
            it = kind("e", server.url, api_key=Secret("own-key"))
            await read(await open_(it, UpstreamRequest("POST", "/v1/x?q=a%2Fb&r=ü", headers, b"12345")))
            await it.aclose()

            assert sorted(seen[0].headers) == [
                ("accept-encoding", "identity"),
                ("authorization", "Bearer own-key"),
                ("content-length", "5"),
                ("host", f"127.0.0.1:{server.port}"),
                ("x-cjk", "模型".encode().decode("latin-1")),
                ("x-kept", "yes"),
                ("x-team", "Größe"),
            ]
            assert seen[0].path == "/v1/x?q=a%2Fb&r=%C3%BC"
            assert seen[0].body == b"12345"

    run(body())


def test_answer_headers_lose_hop_by_hop_fields_and_cookies_and_keep_odd_bytes(kind: Kind) -> None:
    raw = (
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
        b"Set-Cookie: a=b\r\nX-Odd: \x80\xff\r\nVary: A\r\nVary: B\r\ncontent-length: 0\r\n\r\n"
    )

    async def body() -> None:
        async with RawServer(serve(lambda _: raw)) as server, upstream(kind, server.url) as it:
            response = await open_(it)
            response.close()

            assert sorted(response.headers) == [
                (b"content-length", b"0"),
                (b"vary", b"A"),
                (b"vary", b"B"),
                (b"x-odd", b"\x80\xff"),
            ]

    run(body())


def test_a_compressed_answer_passes_undecoded_with_its_own_length(kind: Kind) -> None:
    packed = gzip.compress(b'{"a":1}')
    headers = "content-encoding: gzip\r\n"

    async def body() -> None:
        async with (
            RawServer(serve(lambda _: answer(packed, headers=headers))) as server,
            upstream(kind, server.url) as it,
        ):
            response = await open_(it)

            assert response.header(b"content-length") == b"%d" % len(packed)
            assert await read(response) == packed

    run(body())


def test_head_204_and_an_answer_that_ends_by_closing_are_read(kind: Kind) -> None:
    said = iter(
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n",
            b"HTTP/1.1 204 No Content\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n\r\nto the end",
        )
    )

    async def script(connection: Connection) -> None:
        while await connection.request() is not None:
            await connection.send(head := next(said))
            if head.endswith(b"end"):
                return

    async def body() -> None:
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            assert await read(await open_(it, UpstreamRequest("HEAD", "/"))) == b""
            assert await read(await open_(it)) == b""
            assert await read(await open_(it)) == b"to the end"

    run(body())


def test_a_redirect_is_an_answer_like_any_other(kind: Kind) -> None:
    async def body() -> None:
        said = answer(b"", status=307, headers="location: http://192.0.2.1/\r\n")
        async with RawServer(serve(lambda _: said)) as server, upstream(kind, server.url) as it:
            response = await open_(it, POST)
            response.close()

            assert response.status == 307

    run(body())


def test_proxy_variables_of_the_environment_are_ignored(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setitem(os.environ, name, "socks5://127.0.0.1:1")

    async def body() -> None:
        async with RawServer(serve(lambda _: answer(b"{}"))) as server, upstream(kind, server.url) as it:
            assert await read(await open_(it)) == b"{}"

    run(body())


def test_a_refused_connection_is_one_that_failed_to_connect(kind: Kind) -> None:
    async def body() -> None:
        async with upstream(kind, refused_url()) as it:
            with pytest.raises(ConnectFailed) as caught:
                await open_(it, POST)

            assert not isinstance(caught.value, ConnectionsBusy)

    run(body())


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncont", b"garbage\r\n\r\n"])
def test_a_connection_lost_before_the_headers_is_no_failure_to_connect(kind: Kind, sent: bytes) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(sent)
        connection.reset()

    async def body() -> None:
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            with pytest.raises(UpstreamLost) as caught:
                await open_(it, POST)

            assert str(caught.value)

    run(body())


@pytest.mark.parametrize("cut", [b"4\r\nab", piece(b"abcd")])
def test_a_connection_lost_amid_the_body_is_lost_after_what_came(kind: Kind, cut: bytes) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + piece(b"first") + cut)
        connection.writer.close()

    async def body() -> None:
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            response = await open_(it, POST)
            first = await response.read()
            with pytest.raises(UpstreamLost):
                await rest_of(response)
            response.close()

            assert first.startswith(b"first")
            await at_rest(it)

    run(body())


def test_a_server_that_closed_its_kept_connection_costs_nothing(kind: Kind) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(answer(b"{}"))

    async def body() -> None:
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            for _ in range(5):
                assert await read(await open_(it, POST)) == b"{}"
                # Let the server's close arrive, as it has long before vLLM's next request.
                while server._tasks:
                    await asyncio.sleep(0)

            assert server.connections == 5

    run(body())


@pytest.mark.parametrize("head", [b"", STREAM_HEAD], ids=["no-headers", "headers-before-the-prefill"])
def test_silence_before_the_first_byte_of_the_body_ends_at_the_first_byte_limit(kind: Kind, head: bytes) -> None:
    gone = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(head)
        await connection.closed()
        gone.set()

    async def body() -> None:
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            with pytest.raises(UpstreamTimeout) as caught:
                await read(await open_(it, POST, first_byte_s=0.05, idle_s=30))
            await gone.wait()

            assert caught.value.phase == "first_byte"
            assert caught.value.limit_s == 0.05
            await at_rest(it)

    run(body())


def test_a_long_prefill_is_not_cut_by_the_idle_limit(kind: Kind) -> None:
    prefilled = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD)
        await prefilled.wait()
        await connection.send(piece(b"token") + piece(b""))

    async def body() -> None:
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            response = await open_(it, POST, first_byte_s=10, idle_s=0.05)
            # Longer than the idle limit by the loop's own clock.
            asyncio.get_running_loop().call_later(0.1, prefilled.set)

            assert await read(response) == b"token"

    run(body())


def test_silence_amid_the_body_ends_at_the_idle_limit(kind: Kind) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + piece(b"token"))
        await connection.closed()

    async def body() -> None:
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            with pytest.raises(UpstreamTimeout) as caught:
                await read(await open_(it, POST, first_byte_s=30, idle_s=0.05))

            assert caught.value.phase == "idle"

    run(body())


def test_an_answer_left_unread_closes_its_socket(kind: Kind) -> None:
    async def body() -> None:
        left = asyncio.Semaphore(0)

        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(STREAM_HEAD + piece(b"a") + piece(b"b"))
            await connection.closed()
            left.release()

        async with RawServer(script) as server, upstream(kind, server.url) as it:
            for number in range(40):
                response = await open_(it, POST)
                if number % 2:
                    await response.read()
                response.close()
                response.close()
                await left.acquire()

            await at_rest(it)

    run(body())


@pytest.mark.parametrize("phase", ["open", "read"])
def test_a_cancelled_caller_closes_the_socket_too(kind: Kind, phase: str) -> None:
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

        async def call(it: EngineUpstream | HttpxUpstream) -> None:
            response = await open_(it, POST)
            try:
                await rest_of(response)
            finally:
                response.close()

        async with RawServer(script) as server, upstream(kind, server.url) as it:
            task = asyncio.create_task(call(it))
            await asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await left.wait()

            await at_rest(it)

    run(body())


def test_a_caller_cancelled_at_any_step_leaves_no_connection_behind(kind: Kind) -> None:
    async def script(connection: Connection) -> None:
        while await connection.request() is not None:
            await connection.send(STREAM_HEAD + piece(b"a"))
            await connection.send(piece(b""))

    async def call(it: EngineUpstream | HttpxUpstream) -> None:
        response = await open_(it, POST)
        try:
            await rest_of(response)
        finally:
            response.close()

    async def body() -> None:
        async with RawServer(script) as server:
            steps, untouched = 0, False
            while not untouched:
                async with upstream(kind, server.url) as it:
                    task = asyncio.create_task(call(it))
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    untouched = not task.cancelled()
                    await at_rest(it)
                steps += 1 + steps // 20
            # Bounded by the guard of `run`: a connection left open would keep its script waiting.
            while server._tasks:
                await asyncio.sleep(0)

    run(body())


def test_a_silent_engine_takes_no_place_of_another(kind: Kind) -> None:
    async def silent(connection: Connection) -> None:
        await connection.closed()

    async def body() -> None:
        async with (
            RawServer(silent) as first,
            RawServer(serve(lambda _: answer(b"{}"))) as second,
            upstream(kind, first.url, connections_max=3) as stuck,
            upstream(kind, second.url) as healthy,
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

            await at_rest(stuck, 3)

    run(body())


def test_closing_the_upstream_ends_what_is_open(kind: Kind) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + piece(b"a"))
        await connection.closed()

    async def body() -> None:
        async with RawServer(script) as server, upstream(kind, server.url) as it:
            response = await open_(it, POST)
            assert await response.read() == b"a"
            await it.aclose()
            await it.aclose()

            with pytest.raises(UpstreamError):
                await response.read()
            response.close()

    run(body())


def test_a_unix_socket_is_an_engine_too(kind: Kind, tmp_path: object) -> None:
    async def body() -> None:
        path = f"{tmp_path}/e.sock"

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await Connection(reader, writer, 1).request()
            writer.write(answer(b"{}"))
            writer.close()

        server = await asyncio.start_unix_server(accept, path)
        async with upstream(kind, f"unix://{path}") as it:
            assert await read(await open_(it)) == b"{}"
        server.close()
        await server.wait_closed()

    run(body())


@pytest.mark.parametrize(
    "url", ["ftp://x", "127.0.0.1:8000", "http://", "http://user:pw@x", "http://x/?a=1", "http://x:port"]
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(kind: Kind, url: str) -> None:
    with pytest.raises(ValueError, match=r"^e: ") as caught:
        kind("e", url, api_key=None)

    assert "pw" not in str(caught.value)


def test_a_path_too_long_for_a_url_is_the_clients_mistake(kind: Kind) -> None:
    async def body() -> None:
        async with upstream(kind, "http://127.0.0.1:1") as it:
            with pytest.raises(ApiError) as caught:
                await open_(it, UpstreamRequest("GET", "/?" + "x" * 100_000))

            assert caught.value.status == 400

    run(body())
