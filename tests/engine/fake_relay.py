"""An outside OpenAI-compatible provider of a few lines: answers every chat with one sentence, and keeps what it got."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RELAY_TEXT = "answered by the relay"


class FakeRelay:
    """Listens from construction to `close()`. `received` holds the JSON bodies in the order of arrival."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send("application/json", json.dumps({"object": "list", "data": []}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                received.append(body)
                if body.get("stream"):
                    self._send("text/event-stream", _events(body))
                else:
                    self._send("application/json", json.dumps(_completion(body)).encode())

            def _send(self, content_type: str, body: bytes) -> None:
                self.send_response(200)
                self.send_header("content-type", content_type)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="fake-relay", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}


def _completion(body: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": RELAY_TEXT}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {**_envelope(body, "chat.completion"), "choices": [choice], "usage": _USAGE}


def _events(body: dict[str, Any]) -> bytes:
    said = {"index": 0, "delta": {"role": "assistant", "content": RELAY_TEXT}, "finish_reason": None}
    ended = {"index": 0, "delta": {}, "finish_reason": "stop"}
    chunks: list[dict[str, Any]] = [{"choices": [said]}, {"choices": [ended]}, {"choices": [], "usage": _USAGE}]
    envelope = _envelope(body, "chat.completion.chunk")
    events = [f"data: {json.dumps({**envelope, **chunk})}\n\n" for chunk in chunks]
    return "".join([*events, "data: [DONE]\n\n"]).encode()


def _envelope(body: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-relay", "object": kind, "created": 1_700_000_000, "model": body["model"]}
