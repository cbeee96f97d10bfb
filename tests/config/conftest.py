"""A small valid configuration, and a way to try it with changes."""

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from router.config.load import Overrides, load
from router.config.model import RouterConfig
from router.config.problems import ConfigErrors, Problem

VALID = """\
server: {port: 8080}
engines:
  - name: short
    url: http://127.0.0.1:8001
  - name: long
    url: http://127.0.0.1:8002
models:
  - name: llama
    aliases: [small]
    pools:
      chat:
        engines: [short]
        max_model_len: 4096
        max_num_seqs: 16
      batch:
        engines: [long]
        max_model_len: 32768
        max_num_seqs: 2
"""


class Folder:
    """A folder with one configuration in it. `environ` is all that the loader sees of the environment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "pools.yaml"
        self.environ: dict[str, str] = {}

    def write(self, text: str) -> Path:
        self.file.write_text(textwrap.dedent(text))
        return self.file

    def load(self, text: str | None = None, overrides: Overrides | None = None) -> RouterConfig:
        if text is not None:
            self.write(text)
        return load(self.file, environ=self.environ, overrides=overrides)

    def problems(self, text: str | None = None, overrides: Overrides | None = None) -> tuple[Problem, ...]:
        with pytest.raises(ConfigErrors) as caught:
            self.load(text, overrides)
        return caught.value.problems

    def problem(self, text: str, overrides: Overrides | None = None) -> Problem:
        """The one problem there is to be."""
        problems = self.problems(text, overrides)
        assert len(problems) == 1, [str(problem) for problem in problems]
        return problems[0]

    def edited(self, changes: Mapping[str, str]) -> str:
        """The valid text with each key of `changes`, which must be in it once, replaced."""
        text = VALID
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def valid() -> str:
    return VALID


@pytest.fixture
def edit(folder: Folder) -> Callable[[Mapping[str, str]], Problem]:
    """The one problem of the valid text with some of it replaced."""
    return lambda changes: folder.problem(folder.edited(changes))
