"""Tests are coroutines; they run in the event loop of their module's stage, in which the router lives too."""

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.http.stack", "tests.cases.house")

from router.upstream.health import ProbeTimes  # noqa: E402 -- after the rewriting
from tests.cases.house import House, house_of, short_collections  # noqa: E402 -- likewise
from tests.http.conftest import pytest_pyfunc_call, stage  # noqa: E402 -- likewise
from tests.http.scripted import says  # noqa: E402 -- likewise
from tests.http.stage import Stage  # noqa: E402 -- likewise

__all__ = ["pytest_pyfunc_call", "stage"]


@pytest.fixture(scope="module")
def shared_house(stage: Stage) -> House:
    """One router of the module before engines C and L, for tests that do not disturb each other."""
    return stage.start(house_of())


@pytest.fixture
def house(stage: Stage, shared_house: House) -> Iterator[House]:
    """The module's router; its engines answer anew, and it is at rest again after the test."""
    for engine in shared_house.engines.values():
        engine.calls.clear()
        engine.taken_back = 0
    yield shared_house
    for engine in shared_house.engines.values():
        engine.answering = says()
    stage.run(shared_house.check_after())


@pytest.fixture(scope="module", autouse=True)
def quick_probes() -> Iterator[None]:
    """Engines are looked after twenty times as often as in earnest, and nothing stops the loop for long."""
    quick = ProbeTimes(interval_s=0.05, again_s=0.02, connect_s=1.0, health_s=0.15, work_s=1.0, work_pause_max_s=0.1)
    with short_collections(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.upstream.health.ProbeTimes", lambda: quick)
        yield
