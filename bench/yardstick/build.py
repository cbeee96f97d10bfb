"""Compiles the yardstick's two C programs on first use, and says where the results are kept.

Rules: built with warnings as errors; a program is named by the hash of its source, so that a change is never missed and
two trees can share one cache. Nothing is downloaded here.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["NoCompiler", "cache_dir", "program"]

_SOURCES = Path(__file__).parent
_FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror")
_COMPILE_MAX_S = 120


class NoCompiler(Exception):
    """This machine cannot build the yardstick. The text says what to do."""


def cache_dir() -> Path:
    """Where built programs and other routers are kept: `ROUTER_BENCH_CACHE`, else `.cache/bench` of this tree."""
    named = os.environ.get("ROUTER_BENCH_CACHE")
    folder = Path(named) if named else _SOURCES.parents[1] / ".cache" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def program(name: str) -> Path:
    """The compiled `mock` or `loadgen`.

    Raises: `NoCompiler` where there is no C compiler; `RuntimeError` with its words where it refuses the source.
    """
    source = _SOURCES / f"{name}.c"
    digest = hashlib.sha256(source.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:12]
    built = cache_dir() / f"{name}-{digest}"
    if built.exists():
        return built
    compiler = next((found for each in ("cc", "gcc", "clang") if (found := shutil.which(each))), None)
    if compiler is None:
        raise NoCompiler("no C compiler (cc, gcc or clang): apt-get install gcc libc6-dev, or your system's package")
    # Moved into place whole: another run may be building the same program.
    unfinished = built.with_name(f"{built.name}.{os.getpid()}")
    done = subprocess.run(
        [compiler, *_FLAGS, "-o", str(unfinished), str(source)],
        capture_output=True,
        text=True,
        timeout=_COMPILE_MAX_S,
        check=False,
    )
    if done.returncode != 0:
        unfinished.unlink(missing_ok=True)
        raise RuntimeError(f"{compiler} does not compile {source.name}:\n{done.stderr}")
    unfinished.rename(built)
    return built
