"""`router check`: exit codes, lines and JSON for people and programs."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from router.cli.check import check

EXAMPLE = Path(__file__).parents[2] / "pools.yaml"


@pytest.fixture
def run():
    app = typer.Typer()
    app.command("check")(check)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def broken(tmp_path):
    path = tmp_path / "pools.yaml"
    path.write_text(
        EXAMPLE.read_text().replace("port: 8080", "prot: MARKER").replace("max_model_len: 4096", "max_model_len: 4k")
    )
    return path


def test_the_example_passes(run):
    result = run("-c", EXAMPLE)

    assert result.exit_code == 0
    assert result.stdout == f"{EXAMPLE}: ok (models 1, engines 2, relays 0, keys 0)\n"


def test_the_example_passes_for_programs_too(run):
    result = run("-c", EXAMPLE, "--json")

    assert result.exit_code == 0
    assert json.loads(result.stdout)["ok"] is True
    assert json.loads(result.stdout)["problems"] == []


def test_a_broken_file_exits_with_2_and_a_line_for_each_problem(run, broken):
    result = run("--config", broken)

    lines = result.stdout.splitlines()
    assert result.exit_code == 2
    assert len(lines) == 2
    assert lines[0].startswith(f"{broken}:10: server.prot: ")
    assert lines[0].endswith("Did you mean server.port?")
    assert lines[1].endswith("models[0].pools.chat.max_model_len: 4k: is not a whole number of tokens. Write 4096.")
    assert "MARKER" not in result.output


def test_a_broken_file_is_told_as_json_on_request(run, broken):
    result = run("-c", broken, "--json")

    told = json.loads(result.stdout)
    assert result.exit_code == 2
    assert told["ok"] is False
    assert set(told["problems"][0]) == {"file", "line", "where", "value", "message", "fix"}
    assert [problem["where"] for problem in told["problems"]] == ["server.prot", "models[0].pools.chat.max_model_len"]


def test_a_missing_file_exits_with_2(run, tmp_path):
    result = run("-c", tmp_path / "none.yaml")

    assert result.exit_code == 2
    assert "there is no such file" in result.stdout


def test_a_variable_that_is_not_set_is_refused_by_the_real_environment(run, tmp_path, monkeypatch):
    path = tmp_path / "pools.yaml"
    path.write_text(EXAMPLE.read_text().replace("# api_key: ${VLLM_API_KEY}", "api_key: ${VLLM_API_KEY}"))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    refused = run("-c", path)
    monkeypatch.setenv("VLLM_API_KEY", "sk-1")
    taken = run("-c", path)

    assert (refused.exit_code, taken.exit_code) == (2, 0)
    assert "VLLM_API_KEY is not set" in refused.stdout


def test_the_schema_is_printed_without_looking_at_a_file(run, tmp_path):
    result = run("-c", tmp_path / "none.yaml", "--schema")

    assert result.exit_code == 0
    assert json.loads(result.stdout)["title"] == "File"
