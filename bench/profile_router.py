"""Runs `router` with a sampling profiler: python bench/profile_router.py OUT.json serve --config ...

Every millisecond the running line is noted, with the layer of the router it belongs to; a loop that waits is not noted.
Time inside a library counts for the router's own line that called it, and time in C code for the Python line that
called that; reading from sockets in the loop counts for the callback that comes next. At the end OUT.json holds
{samples, user_s, kernel_s, layers: {name: samples}, lines: [[function, samples], ...]}.

`overhead.py --profile` starts it; the samples cost time themselves, so figures of cost are never taken from such a run.
"""

import json
import resource
import signal
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

_PACKAGE = f"{_ROOT / 'router'}/"
_INTERVAL_S = 0.001
_LINES_MAX = 40

#: The first whose mark begins the module's path inside `router/` is its layer.
_LAYERS = (
    ("inbound", ("http/inbound", "http/client", "http/head", "http/exchange")),
    ("guard", ("http/guard", "http/routes")),
    ("parse", ("http/parsing", "http/decoding", "http/texts", "http/bodies", "http/multipart", "request")),
    ("count", ("tokens/", "http/sizing")),
    ("admission", ("policy/", "flow/gate", "flow/lease", "flow/line", "flow/job", "flow/attempt", "queue/")),
    ("health", ("upstream/health", "upstream/scrape")),
    ("headers", ("upstream/headers", "flow/outgoing")),
    ("answer", ("flow/", "http/stream", "upstream/sse", "upstream/framing", "http/responses")),
    ("connection", ("upstream/",)),
    ("metrics", ("observe/",)),
    ("inference", ("http/",)),
    ("loop", ("cli/", "app")),
)
#: Libraries that are a layer of their own; time in all others is their caller's.
_LIBRARIES = {"uvicorn": "inbound", "starlette": "guard", "prometheus_client": "metrics"}
_LOOP = "loop"


@cache
def layer_of(path: str) -> str | None:
    """The layer of a source file; None for one that is no part of the walk, so that its caller is asked."""
    if path.startswith(_PACKAGE):
        inside = path.removeprefix(_PACKAGE)
        return next((name for name, marks in _LAYERS if inside.startswith(marks)), "rest of router")
    return next((layer for name, layer in _LIBRARIES.items() if f"/site-packages/{name}/" in path), None)


class Sampler:
    """Says where the main thread's time goes while it works, from `start` to `stop`."""

    def __init__(self) -> None:
        self._cpu_s = 0.0
        self._layers: Counter[str] = Counter()
        self._lines: Counter[str] = Counter()

    def start(self) -> None:
        signal.signal(signal.SIGALRM, self._take)
        self._cpu_s = time.thread_time()
        signal.setitimer(signal.ITIMER_REAL, _INTERVAL_S, _INTERVAL_S)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _take(self, _: int, frame: FrameType | None) -> None:
        used_s = time.thread_time() - self._cpu_s
        layer = None
        line = ""
        while frame is not None and layer is None:
            path = frame.f_code.co_filename
            layer = layer_of(path)
            line = f"{Path(path).stem}.{frame.f_code.co_qualname}"
            frame = frame.f_back
        layer = layer or _LOOP
        # The loop's own line without CPU time behind it: it waited, and the look itself woke it.
        if layer != _LOOP or used_s > _INTERVAL_S / 2:
            self._layers[layer] += 1
            self._lines[line] += 1
        self._cpu_s = time.thread_time()

    def result(self) -> dict[str, object]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "samples": self._layers.total(),
            "user_s": used.ru_utime,
            "kernel_s": used.ru_stime,
            "layers": dict(self._layers.most_common()),
            "lines": self._lines.most_common(_LINES_MAX),
        }


def main() -> None:
    out = Path(sys.argv[1])
    sys.argv = ["router", *sys.argv[2:]]
    from router.cli.main import main as router_main

    sampler = Sampler()
    sampler.start()
    try:
        router_main()
    finally:
        sampler.stop()
        out.write_text(json.dumps(sampler.result()))


if __name__ == "__main__":
    main()
