"""What the router cannot start without."""

import subprocess
import sys

import pytest

HIDING = "import sys, runpy; sys.modules[{name!r}] = None; sys.argv = ['router', 'serve']; runpy.run_module('router')"


@pytest.mark.parametrize("name", ["httptools", "uvloop"])
def test_without_its_http_parser_or_event_loop_the_start_is_refused_in_words(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", HIDING.format(name=name)], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"router: cannot start without {name}, ")
    assert "Traceback" not in done.stderr
