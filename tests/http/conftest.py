"""One router for the tests of a module that do not disturb each other, and a look after each of them."""

from collections.abc import Iterator

import pytest

from tests.http.stack import Stack, Stage, outside_sim, stack_of


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def shared(stage: Stage) -> Stack:
    """Engines C and L and relay X, without keys."""
    return stage.start(stack_of(x=outside_sim()))


@pytest.fixture
def stack(stage: Stage, shared: Stack) -> Iterator[Stack]:
    """The module's router, at rest again after the test."""
    yield shared
    stage.run(shared.check_at_rest())
