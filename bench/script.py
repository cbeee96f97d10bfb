"""What every measurement's command does around it: a folder of its own, one line where it cannot be, and the result.

Exit codes: 1 where it could not be measured, 3 where a promise is not kept, 130 after Ctrl-C.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from bench.children import ChildFailed, stop_on_sigterm
from bench.proxies import Missing
from bench.yardstick.build import NoCompiler

_NOT_MEASURED = (ChildFailed, Missing, NoCompiler, OSError, RuntimeError, subprocess.SubprocessError, httpx.HTTPError)


def measured(name: str, measure: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` finds, given an empty folder that is gone afterwards. Exits where it cannot be measured."""
    try:
        with stop_on_sigterm(), tempfile.TemporaryDirectory(prefix=f"{name.replace('_', '-')}-") as folder:
            return measure(Path(folder))
    except _NOT_MEASURED as error:
        sys.stderr.write(f"{name}: {error or type(error).__name__}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def show(found: Mapping[str, Any], out: Path | None, text: str | None = None) -> None:
    """Write `found` as JSON to `out`, where one is given, and print `text`, or the same where there is none."""
    whole = json.dumps(found, indent=1)
    if out is not None:
        out.write_text(whole + "\n")
    print(whole if text is None else text)
