"""docs/http.md names every route, header, reason and error code that there is, and none that there is not."""

import re
from pathlib import Path
from typing import Any, cast, get_args

from starlette.routing import Route

from router.clock import SystemClock
from router.config.keys import KeyRing
from router.config.load import load
from router.config.schema import Grant
from router.http.client import router_headers
from router.http.doorstep import OPEN_PATHS
from router.http.routes import INFERENCE_PATHS, build
from router.http.service import Models, RouterState
from router.http.upload import BufferBudget
from router.observe.metrics import Metrics
from router.policy.classify import Reason
from router.request import Count, RequestRecord
from tests.docs.page import codes, first_codes, rows, sections, without_repeats
from tests.docs.source import error_codes, literals
from tests.http.setting import write_config

PAGE = "docs/http.md"


def _routes(folder: Path) -> set[tuple[str, str]]:
    config = load(write_config(folder, {"c": "http://127.0.0.1:1", "l": "http://127.0.0.1:2"}), environ={})
    state = RouterState(
        config, SystemClock(), KeyRing(()), Models(()), Metrics(), BufferBudget(0), router_id="r", process_id="r-0"
    )
    guard, _ = build(state)
    found: set[tuple[str, str]] = set()
    for route in cast("Any", guard)._table.routes:
        assert isinstance(route, Route)
        path = re.sub(r":\w+\}", "}", route.path)
        methods = {"POST"} if path in INFERENCE_PATHS else (route.methods or set()) - {"HEAD"}
        found |= {(method, path) for method in methods}
    return found


def _record() -> RequestRecord:
    count = Count(
        prompt_tokens=1, longest_tokens=1, lower_tokens=1, upper_tokens=1, prompts=1, exact=True, method="exact"
    )
    return RequestRecord(
        "id", 0.0, pool="chat", engine="short", relay="provider", reason="below_threshold", count=count
    )


def test_every_route_has_a_row_and_no_row_names_a_route_that_is_not_there(tmp_path: Path) -> None:
    table = [(codes(row[0])[0], codes(row[1])[0]) for row in rows(sections(PAGE, 2)["Routes"])]

    assert len(table) == len(set(table))
    assert set(table) == _routes(tmp_path)


def test_the_page_calls_exactly_those_routes_open_that_need_no_key() -> None:
    open_paths = {codes(row[1])[0] for row in rows(sections(PAGE, 2)["Routes"]) if row[2].endswith("open")}

    assert open_paths == OPEN_PATHS


def test_every_header_that_the_router_adds_has_a_row_and_every_row_is_a_header_that_it_sets() -> None:
    documented = without_repeats(first_codes(sections(PAGE, 2)["Response headers"]))

    assert {name for name in documented if name.startswith("x-r")} == {
        name.decode() for name, _ in router_headers(_record())
    }
    assert documented - literals() == set()


def test_every_request_header_in_the_page_is_one_that_the_source_reads() -> None:
    headers = sections(PAGE, 2)["Request headers"].split("### ")[0]
    documented = without_repeats(first_codes(headers))

    assert documented - literals() == set()
    assert {"authorization", "x-api-key", "x-request-id", "x-router-class", "x-router-hop"} <= documented


def test_every_grant_of_a_key_has_a_row() -> None:
    grants = without_repeats(first_codes(sections(PAGE, 3)["What a key may set"].split("## ")[0]))

    assert grants == set(get_args(Grant))


def test_every_reason_of_the_classification_has_a_row() -> None:
    table = rows(sections(PAGE, 2)["Classification"])
    reasons = [codes(row[-1])[0] for row in table if not row[-1].startswith("refused")]

    assert without_repeats(reasons) == {reason.value for reason in Reason}


def test_every_error_code_has_a_row_with_its_status() -> None:
    table = rows(sections(PAGE, 2)["Error codes"])
    documented = {codes(row[0])[0]: row[1] for row in table}
    in_source = error_codes()

    assert len(table) == len(documented)
    assert set(documented) == set(in_source)
    for code, statuses in in_source.items():
        # One code may stand in a status line and, later, in an error event; where both are given they agree.
        known = {str(status) for status in statuses if status is not None}
        assert known == ({documented[code]} if documented[code].isdecimal() else set()), code
