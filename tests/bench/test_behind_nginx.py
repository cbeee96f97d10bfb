"""Behind an nginx with its default settings, which buffers answers, a stream is a stream."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.nginx_first_token import past_router, through_router


@pytest.fixture
def folder() -> Iterator[Path]:
    """Open to the user that nginx gives its worker, which the folders of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="nginx-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


def test_the_first_token_comes_before_the_engine_has_written_the_second(folder: Path) -> None:
    found = asyncio.run(through_router(folder))

    assert found["first_token_at_once"]
    assert found["engine_had_written"] == 1
    assert found["text_is_whole"]
    assert found["content_type"].startswith("text/event-stream")
    assert found["cache_control"] == "no-cache"
    assert not found["has_content_length"]


def test_the_same_nginx_holds_back_an_answer_that_does_not_ask_it_not_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.nginx_first_token.HELD_AFTER_S", 0.5)

    found = asyncio.run(past_router(folder))

    assert not found["first_token_at_once"]
