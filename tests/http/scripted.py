"""An engine whose answers to clients are bytes that a test wrote, for what the simulated one does not do.

Health, metrics, version, models and the router's own request for a token are answered as a healthy engine would.
"""

from collections.abc import Awaitable, Callable

from tests.upstream.fakes import STREAM_HEAD, Connection, FakeEngine, SeenRequest, answer, piece

Answering = Callable[[SeenRequest, Connection], Awaitable[None]]

COMPLETION = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"llama","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"yes"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6}}'
)


class ScriptedEngine:
    """`answering` plays on the connection of each call that came from a client; `calls` keeps them all."""

    def __init__(self, answering: Answering, *, max_model_len: int = 1_024, capacity_tokens: int = 16_384) -> None:
        self.answering = answering
        self.calls: list[SeenRequest] = []
        self._healthy = FakeEngine(names=("llama",), max_model_len=max_model_len, capacity_tokens=capacity_tokens)

    async def play(self, connection: Connection) -> None:
        """One connection, request after request."""
        while (request := await connection.request()) is not None:
            if request.all("x-request-id") or request.all("x-router-hop") or request.path.startswith("/v1/responses/"):
                self.calls.append(request)
                await self.answering(request, connection)
            else:
                await connection.send(await self._healthy.handle(request))


def says(
    body: bytes = COMPLETION, *, status: int = 200, headers: str = "content-type: application/json\r\n"
) -> Answering:
    """Always the same answer."""

    async def answering(_: SeenRequest, connection: Connection) -> None:
        await connection.send(answer(body, status=status, headers=headers))

    return answering


def streams(*events: bytes) -> Answering:
    """A stream of these bytes, one chunk of the body each, with `[DONE]` left to the caller."""

    async def answering(_: SeenRequest, connection: Connection) -> None:
        await connection.send(STREAM_HEAD)
        for event in events:
            await connection.send(piece(event))
        await connection.send(piece(b""))

    return answering


def chunk(text: str) -> bytes:
    """One event of a chat stream."""
    return b'data: {"choices":[{"index":0,"delta":{"content":"' + text.encode() + b'"},"finish_reason":null}]}\n\n'


DONE = b"data: [DONE]\n\n"
