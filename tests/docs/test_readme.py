"""What the README tells a new user to write and to type is what the router takes."""

import itertools
import re
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from router.cli.main import app
from router.config.load import load
from router.policy.demand import RequestClass
from tests.docs.page import ROOT, text

README = "README.md"


def _yaml() -> str:
    [block] = re.findall(r"^```yaml\n(.*?)^```", text(README), re.MULTILINE | re.DOTALL)
    return str(block)


def _command_lines() -> list[list[str]]:
    """The words of every indented command line, continued lines joined."""
    joined = re.sub(r"\\\n\s*", " ", text(README))
    lines = re.findall(r"^    (\S.*)$", joined, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def _flags(words: list[str]) -> dict[str, str]:
    return {word: value for word, value in itertools.pairwise(words) if word.startswith("--")}


def test_the_configuration_in_the_readme_can_be_served(tmp_path: Path) -> None:
    file = tmp_path / "pools.local.yaml"
    file.write_text(_yaml())

    config = load(file)

    [model] = config.models.values()
    assert {pool.request_class for pool in model.pools} == set(RequestClass)


def test_the_engines_in_the_readme_are_started_with_the_shapes_that_its_configuration_gives_them(
    tmp_path: Path,
) -> None:
    file = tmp_path / "pools.local.yaml"
    file.write_text(_yaml())
    config = load(file)
    [model] = config.models.values()
    shapes = {
        config.engines[pool.engines[0]].url.rpartition(":")[2]: (str(pool.max_model_len), str(pool.max_num_seqs))
        for pool in model.pools
    }

    for program in ("vllm", "router sim"):
        started = [_flags(line) for line in _command_lines() if " ".join([*program.split(), "serve"]) in " ".join(line)]

        assert {flags["--port"]: (flags["--max-model-len"], flags["--max-num-seqs"]) for flags in started} == shapes
        assert {flags.get("--served-model-name", flags.get("--model")) for flags in started} == {model.name}


def test_the_engines_own_limit_leaves_room_for_all_that_the_router_may_send() -> None:
    for line in _command_lines():
        if "vllm" in line:
            flags = _flags(line)
            assert int(flags["--max-num-queued-reqs"]) > int(flags["--max-num-seqs"])


def test_every_router_command_in_the_readme_exists_with_its_options() -> None:
    inline = re.findall(r"`(router [^`]+)`", text(README))
    lines = [line for line in _command_lines() if line[0] == "router"] + [shlex.split(line) for line in inline]

    assert len(lines) >= 5
    for words in lines:
        command = cast("Any", typer.main.get_command(app))
        rest = words[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        known = {spelling for option in command.params for spelling in option.opts}
        assert [word for word in rest if word.startswith("-") and word not in known] == [], words


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/index.md", "bench/README.md"])
def test_every_make_target_that_a_page_names_is_in_the_makefile(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    named = set(re.findall(r"(?:^    |`)(?:\w+=\S+ )?make ([a-z-]+)", text(page), re.MULTILINE))

    assert named - targets == set()
