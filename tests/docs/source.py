"""What the router's source says, read without running it: the errors that it can answer with, and its literals."""

import ast
from collections.abc import Iterator
from functools import cache

from tests.docs.page import ROOT

#: The simulated engine answers with vLLM's errors, not with ours.
_NOT_OURS = ROOT / "router" / "sim"


@cache
def modules() -> tuple[ast.Module, ...]:
    """Every module of the package but the simulator's."""
    files = sorted(file for file in (ROOT / "router").rglob("*.py") if _NOT_OURS not in file.parents)
    return tuple(ast.parse(file.read_text()) for file in files)


def error_codes() -> dict[str, set[int | None]]:
    """Each `code` that an `ApiError` is made with, and its statuses; None where the status is another's to say."""
    found: dict[str, set[int | None]] = {}
    for code, status in _errors():
        found.setdefault(code, set()).add(status)
    return found


def _errors() -> Iterator[tuple[str, int | None]]:
    for call in (node for module in modules() for node in ast.walk(module) if isinstance(node, ast.Call)):
        name = call.func.id if isinstance(call.func, ast.Name) else None
        if name == "ApiError":
            assert len(call.args) >= 2, "an ApiError's status and code come by position"
            status, code = call.args[:2]
            if isinstance(code, ast.Constant):
                yield str(code.value), _number(status)
        elif name == "bad_request":
            words = {keyword.arg: keyword.value for keyword in call.keywords}
            code = words.get("code", ast.Constant("invalid_request"))
            assert isinstance(code, ast.Constant), "the code of a bad request is a plain word"
            yield str(code.value), 400


def _number(status: ast.expr) -> int | None:
    return status.value if isinstance(status, ast.Constant) and isinstance(status.value, int) else None


@cache
def literals() -> frozenset[str]:
    """Every string, or bytes of ASCII, that stands in the source by itself."""
    values = {node.value for module in modules() for node in ast.walk(module) if isinstance(node, ast.Constant)}
    texts = {value for value in values if isinstance(value, str)}
    return frozenset(texts | {value.decode("latin-1") for value in values if isinstance(value, bytes)})
