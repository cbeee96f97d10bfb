"""A server that stands still is seen by the probe, and told from one that has no processor."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import bench.loop_probe

#: Stands still for 0.2 s, as far as it is concerned with nothing but that, on every tenth request.
_STANDING = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    count = 0
    def do_GET(self):
        Handler.count += 1
        until = time.process_time() + (0.2 if Handler.count % 10 == 0 else 0)
        while time.process_time() < until:
            pass
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
        if Handler.count == 25:
            print("enough", flush=True)
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_a_server_that_computes_instead_of_answering_is_seen_and_called_the_cause(tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    with subprocess.Popen([sys.executable, "-c", _STANDING], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        command = [sys.executable, bench.loop_probe.__file__, port, str(server.pid), str(out)]
        with subprocess.Popen(command) as probe:
            assert server.stdout.readline() == "enough\n"
            os.kill(probe.pid, signal.SIGTERM)
        server.kill()

    seen = json.loads(out.read_text())

    assert seen["over_50ms_own"] >= 2
    assert seen["moments"][0]["ran_s"] >= 0.15
    assert seen["answers"] >= 24
