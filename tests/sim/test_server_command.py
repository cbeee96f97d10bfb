"""`router sim`: the command around the simulated server."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from router.cli.sim import sim_app
from router.sim.presets import PRESETS

ROOT = Path(__file__).parents[2]
#: Seconds after which a process that does not end is a failure.
GIVE_UP_S = 20.0


def test_serve_prints_its_url_answers_and_ends_at_sigterm() -> None:
    code = "from router.cli.sim import sim_app; sim_app()"
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--model", "mine", "--max-model-len", "2048"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()

        with urllib.request.urlopen(f"{url}/v1/models", timeout=GIVE_UP_S) as response:
            card = json.load(response)["data"][0]
        process.send_signal(signal.SIGTERM)

        assert (card["id"], card["max_model_len"]) == ("mine", 2_048)
        assert process.wait(GIVE_UP_S) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--preset", "h200"], "no engine preset 'h200'"),
        (["--kv-cache-tokens", "100"], "cannot hold one sequence"),
        (["--fault", '{"kind":"nope"}'], "nope"),
        (["--fault", '{"kind":"cut","ratio":2}'], "ratio"),
        (["--version", "newest"], "newest"),
        (["--scheduling-policy", "lifo"], "lifo"),
    ],
)
def test_an_option_that_makes_no_sense_ends_with_2_and_the_reason(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(sim_app, ["serve", *arguments])

    assert result.exit_code == 2
    assert text in result.stderr


def test_presets_lists_every_preset_with_its_source() -> None:
    result = CliRunner().invoke(sim_app, ["presets"])

    assert result.exit_code == 0
    assert all(each.name in result.stdout and each.source in result.stdout for each in PRESETS.values())


def test_every_flag_of_serve_has_a_heading_in_the_docs() -> None:
    serve = typer.main.get_group(sim_app).commands["serve"]
    flags = [option for each in serve.params for option in each.opts if option != "--help"]

    page = (ROOT / "docs" / "simulator.md").read_text()

    assert [flag for flag in flags if f"### `{flag}`\n" not in page] == []
