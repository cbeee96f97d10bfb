"""How late a router's /healthz is while it reads one large body: python -m bench.large_bodies URL MODEL [MIB]

URL is a running router, `router serve` before any engine or simulator; MODEL one of its models; MIB the body's size, 32
by default. Each kind of body is sent `_ROUNDS` times, while a thread of its own asks for /healthz every 2 ms. Prints
the worst answer of each round in milliseconds, least and median: the least is nearest to what the router does where
others use the machine too.
"""

import http.client
import json
import statistics
import sys
import threading
import time
from urllib.parse import urlsplit

_ROUNDS = 7
_INTERVAL_S = 0.002


def bodies(model: str, size: int) -> dict[str, tuple[str, bytes]]:
    """Path and body by kind, each a little less than `size` bytes."""

    def chat(content: str) -> tuple[str, bytes]:
        message = {"role": "user", "content": content}
        body = {"model": model, "max_tokens": 4, "messages": [message]}
        return "/v1/chat/completions", json.dumps(body, ensure_ascii=False).encode()

    room = size - 1024
    streamed = {"model": model, "stream": True, "messages": [{"role": "user", "content": "a" * room}]}
    ids = b'{"model":"%b","prompt":[%b]}' % (model.encode(), b",".join([b"1234"] * (room // 5)))
    return {
        "one long text": chat("a" * room),
        "text with line ends": chat("Some words of a line.\n" * (room // 23)),
        "nothing but escapes": chat("\n" * (room // 2)),
        "two bytes a character": chat("é" * (room // 2)),
        "four bytes a character": chat("a" + "😀" * (room // 4)),
        "many messages' worth of commas": chat("a,[{" * (room // 4)),
        "a stream, so that a field changes": ("/v1/chat/completions", json.dumps(streamed).encode()),
        "token ids": ("/v1/completions", ids),
    }


class Poll(threading.Thread):
    """Asks until `is_over`; `worst_s` is the slowest answer."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self.worst_s = 0.0
        self.is_over = False
        self._connection = http.client.HTTPConnection(host, timeout=30)

    def run(self) -> None:
        while not self.is_over:
            started_s = time.perf_counter()
            self._connection.request("GET", "/healthz")
            self._connection.getresponse().read()
            self.worst_s = max(self.worst_s, time.perf_counter() - started_s)
            time.sleep(_INTERVAL_S)
        self._connection.close()


def worst_ms(host: str, path: str, body: bytes) -> float:
    """Of the answers while `body` is sent and answered."""
    poll = Poll(host)
    poll.start()
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        connection.getresponse().read()
    finally:
        connection.close()
        poll.is_over = True
        poll.join()
    return poll.worst_s * 1_000


def main() -> None:
    url, model = sys.argv[1:3]
    size = int(sys.argv[3] if len(sys.argv) > 3 else 32) * 2**20
    for kind, (path, body) in bodies(model, size).items():
        rounds = [worst_ms(urlsplit(url).netloc, path, body) for _ in range(_ROUNDS)]
        print(f"{kind:36}{min(rounds):7.0f}{statistics.median(rounds):7.0f}", flush=True)


if __name__ == "__main__":
    main()
