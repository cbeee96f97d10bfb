"""`router check`: exit codes, lines and JSON for people and programs."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from router.cli.check import check

PROXIES = ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]
EXAMPLE = Path(__file__).parents[2] / "pools.yaml"


@pytest.fixture
def run():
    app = typer.Typer()
    app.command("check")(check)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


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


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_of_the_environment_is_told_to_be_ignored_without_its_password(run, monkeypatch, name):
    monkeypatch.setenv(name, "http://user:marker@proxy:3128")

    people, programs = run("-c", EXAMPLE), run("-c", EXAMPLE, "--json")

    assert (people.exit_code, programs.exit_code) == (0, 0)
    assert people.stderr.startswith(f"{name} ignored: ")
    assert len(people.stderr.splitlines()) == 1
    assert json.loads(programs.stdout)["ignored_proxies"] == [name]
    assert "marker" not in people.output + programs.output


def test_no_proxy_and_an_empty_variable_are_no_proxies(run, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HTTP_PROXY", "")

    result = run("-c", EXAMPLE)

    assert result.stderr == ""


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
