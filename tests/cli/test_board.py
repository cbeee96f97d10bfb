"""The live table shows every result once, in the line of whoever answered it."""

import io

from rich.console import Console

from router.cli._board import Board, EngineLoad
from router.policy.demand import RequestClass
from router.sim.load import RequestResult, RouterHeaders


def _result(ending: str = "completed", router: RouterHeaders | None = None) -> RequestResult:
    return RequestResult(
        index=0,
        request_class=RequestClass.CHAT,
        planned_tokens=10,
        intended_at_s=0.0,
        ended_at_s=1.0,
        ending=ending,
        sent_at_s=0.0,
        first_content_at_s=0.25,
        router=router or RouterHeaders(pool="chat", engine="sim-chat", queue_wait_ms=7.0),
    )


def _shown(board: Board) -> list[str]:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(
        board.table(elapsed_s=3.0, in_flight={RequestClass.CHAT: 2}, engines=[EngineLoad("sim-chat", 4, 1)]),
    )
    return [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]


def test_results_are_counted_once_and_apart_by_who_answered() -> None:
    board = Board()
    results = [_result(), _result(router=RouterHeaders(relay="outside"))]

    board.take(results)
    results += [
        _result(),
        _result(ending="http_429"),
        _result(router=RouterHeaders(pool="batch", engine="sim-batch", reason="below_threshold,borrowed")),
    ]
    board.take(results)
    lines = _shown(board)

    assert "chat chat sim-chat 2 250 250 7 7" in lines
    assert "chat relay outside 1 250 250 - -" in lines
    assert "chat - http_429 1 - - 7 7" in lines
    assert "chat batch (borrowed) sim-batch 1 250 250 - -" in lines
    assert "in flight: chat 2" in lines
    assert "engines: sim-chat 4 running 1 waiting" in lines


def test_the_table_has_a_bound() -> None:
    board = Board()

    board.take([_result(router=RouterHeaders(pool="chat", engine=f"e{n}")) for n in range(100)])

    assert "other - - 60 250 250 - -" in _shown(board)
