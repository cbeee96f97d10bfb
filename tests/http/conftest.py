"""One router for the tests of a module that do not disturb each other, and a look after each of them.

Tests are coroutines; they run in the event loop of their module's stage, in which the router lives too.
"""

import inspect
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.http.stack")

from tests.http.scripted import ScriptedEngine, says  # noqa: E402 -- after the rewriting
from tests.http.setting import LONG_TOKENS, model_config, outside_sim  # noqa: E402 -- likewise
from tests.http.stack import Stack, stack_of  # noqa: E402 -- likewise
from tests.http.stage import Stage  # noqa: E402 -- likewise


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on the stage of its module."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    stage = pyfuncitem.funcargs["stage"]
    assert isinstance(stage, Stage)
    stage.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="module", autouse=True)
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


@pytest.fixture(scope="module")
def scripted_stack(stage: Stage) -> tuple[Stack, ScriptedEngine]:
    engine = ScriptedEngine(says(), max_model_len=LONG_TOKENS)
    return stage.start(stack_of(c=engine, long=engine, models=[model_config(borrow=False)])), engine


@pytest.fixture
def raw(stage: Stage, scripted_stack: tuple[Stack, ScriptedEngine]) -> Iterator[tuple[Stack, ScriptedEngine]]:
    """A router of the module whose engines, both of them, say what the test wrote."""
    stack, engine = scripted_stack
    engine.calls.clear()
    yield scripted_stack
    engine.answering = says()
    stage.run(stack.check_at_rest())
