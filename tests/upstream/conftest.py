"""Both event loops: `router serve` runs on uvloop, everything else on asyncio's own."""

import asyncio

import pytest
import uvloop

from . import fakes


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def each_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "new_loop", request.param)
