"""The engines start once a session, all at the same time; routers start where they are first needed."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.fake_relay import FakeRelay
from tests.engine.stack import MODEL, PARTS_MODEL, Fleet, Models, Router, model, pool, start_fleet

_LOGS = pytest.StashKey[Path]()


def _folder_from(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.fail(f"{variable} is not set: these tests need a prepared vLLM, run them with `make test-engine`", False)
    return Path(value)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """Where every program writes; shown at the end of a run that failed."""
    folder = tmp_path_factory.mktemp("logs")
    pytestconfig.stash[_LOGS] = folder
    return folder


def pytest_configure() -> None:
    """A run that is asked to end takes its programs with it, as one that is interrupted from the keyboard does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    folder = config.stash.get(_LOGS, None)
    if folder is None or not (terminalreporter.stats.get("failed") or terminalreporter.stats.get("error")):
        return
    terminalreporter.section(f"logs in {folder}")
    for log in sorted(folder.glob("*.log")):
        terminalreporter.write_line(f"--- {log.name}")
        for line in log.read_text(errors="replace").splitlines()[-25:]:
            terminalreporter.write_line(line[:400])


@pytest.fixture(scope="session")
def models() -> Models:
    return Models(string=_folder_from("ENGINE_MODEL_STRING"), openai=_folder_from("ENGINE_MODEL_OPENAI"))


@pytest.fixture(scope="session")
def fleet(models: Models, logs: Path) -> Iterator[Fleet]:
    fleet = start_fleet(_folder_from("VLLM_VENV"), models, logs)
    try:
        for engine in fleet.engines:
            engine.wait_until_it_serves()
        yield fleet
    finally:
        for engine in fleet.engines:
            engine.program.kill()


@contextmanager
def _listening_relay() -> Iterator[FakeRelay]:
    relay = FakeRelay()
    try:
        yield relay
    finally:
        relay.close()


@pytest.fixture(scope="session")
def relay() -> Iterator[FakeRelay]:
    """What stands behind `router`, whose engines do all its work."""
    with _listening_relay() as relay:
        yield relay


@pytest.fixture(scope="session")
def doomed_relay() -> Iterator[FakeRelay]:
    """What stands behind `doomed_router`."""
    with _listening_relay() as relay:
        yield relay


@contextmanager
def _running(router: Router) -> Iterator[Router]:
    try:
        yield router
    finally:
        router.program.stop()


@pytest.fixture(scope="session")
def router(fleet: Fleet, models: Models, relay: FakeRelay, logs: Path) -> Iterator[Router]:
    """The router as most people run it: two pools, exact counts where they matter, a relay behind."""
    pools = {"chat": pool(fleet.chat), "batch": pool(fleet.batch)}
    served = [model(MODEL, models.string, exact="auto", pools=pools)]
    with _running(Router("router", logs, engines=[fleet.chat, fleet.batch], models=served, relay=relay)) as router:
        yield router


@pytest.fixture(scope="session")
def counting_router(fleet: Fleet, models: Models, logs: Path) -> Iterator[Router]:
    """A router that counts every prompt exactly, of two models whose templates take content in different forms."""
    served = [
        model(MODEL, models.string, exact="always", pools={"chat": pool(fleet.chat)}),
        model(PARTS_MODEL, models.openai, exact="always", pools={"chat": pool(fleet.parts)}),
    ]
    with _running(Router("counting-router", logs, engines=[fleet.chat, fleet.parts], models=served)) as router:
        yield router


@pytest.fixture(scope="session")
def doomed_router(fleet: Fleet, models: Models, doomed_relay: FakeRelay, logs: Path) -> Iterator[Router]:
    """A router whose chat engine is going to be killed."""
    pools = {"chat": pool(fleet.doomed), "batch": pool(fleet.batch)}
    served = [model(MODEL, models.string, exact="auto", pools=pools)]
    engines = [fleet.doomed, fleet.batch]
    with _running(Router("doomed-router", logs, engines=engines, models=served, relay=doomed_relay)) as router:
        yield router
