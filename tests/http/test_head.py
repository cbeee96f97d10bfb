"""What is read of header fields before a request has its route, and where the request goes then."""

from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from router.config.keys import KeyRing
from router.config.model import KeyConfig
from router.http.guard import Guard
from router.http.head import HEAD, Head, RequestIds, presented_key, read_fields
from router.http.routes import INFERENCE_PATHS
from router.request import RequestRecord
from tests.config.test_config_keys import key_of

Headers = list[tuple[bytes, bytes]]
KEY = b"sk-right"


class Noted:
    """An app, and the metrics of a router: what reached it, and which records ended."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.ended: list[RequestRecord] = []
        self.arrivals = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)

    def arrived(self) -> None:
        self.arrivals += 1

    def finish(self, record: RequestRecord) -> None:
        self.ended.append(record)


class State:
    """As much of the router's state as the guard asks for."""

    class config:  # noqa: N801 - stands for an attribute
        class server:  # noqa: N801 - likewise
            connections_max = 2

    class clock:  # noqa: N801 - likewise
        @staticmethod
        def now_s() -> float:
            return 0.0

    def __init__(self, *keys: KeyConfig) -> None:
        self.keys = KeyRing(keys)
        self.metrics = Noted()
        self.tasks: set[int] = set()


async def ask(
    state: Any, path: str = "/v1/chat/completions", method: str = "POST", headers: Headers | None = None
) -> tuple[Noted, Noted, list[Any]]:
    """The apps behind a guard over `state` after one request: of POSTs, and of all else; and what was sent."""
    posts, table, sent = Noted(), Noted(), []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the guard reads no body")

    guard = Guard(state, posts=dict.fromkeys(INFERENCE_PATHS, posts), table=table)
    await guard({"type": "http", "path": path, "method": method, "headers": headers or []}, receive, send)
    return posts, table, sent


def test_ids_are_unlike_each_other_and_those_of_another_process_or_life() -> None:
    one, other = RequestIds(), RequestIds()

    ids = [next(ids.new) for ids in (one, other) for _ in range(1_000)]

    assert len(set(ids)) == 2_000
    assert all(made.startswith("req-") and RequestIds().of(made.encode()) == made for made in ids)


@pytest.mark.parametrize("given", [b"a", b"A-b_c.d:9", b"x" * 128])
def test_a_clients_own_id_is_kept_if_it_is_safe(given: bytes) -> None:
    assert RequestIds().of(given) == given.decode()


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a b", b"a\n", b"a, b", "é".encode(), b'"', b"\x00"])
def test_any_other_id_is_replaced(given: bytes) -> None:
    assert RequestIds().of(given).startswith("req-")


def test_a_field_that_is_there_twice_is_one_with_a_comma_and_said_twice_it_is_one() -> None:
    fields = read_fields([(b"a", b"1"), (b"b", b"x"), (b"a", b"2"), (b"b", b"x"), (b"a", b"3")])

    assert fields == {b"a": b"1, 2, 3", b"b": b"x"}


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([], None),
        ([(b"authorization", b"Bearer k")], b"k"),
        ([(b"authorization", b"  bEaReR   k ")], b"k"),
        ([(b"x-api-key", b" k ")], b"k"),
        ([(b"authorization", b"Bearer k"), (b"x-api-key", b"k")], b"k"),
        ([(b"authorization", b"Bearer k"), (b"x-api-key", b"other")], None),
        ([(b"authorization", b"Basic k"), (b"x-api-key", b"k")], None),
        ([(b"authorization", b"Bearer k"), (b"authorization", b"Bearer k")], b"k"),
        ([(b"authorization", b"k")], None),
        ([(b"authorization", b"Bearer")], b""),
    ],
)
def test_one_key_is_presented_or_none(headers: Headers, key: bytes | None) -> None:
    assert presented_key(read_fields(headers)) == key


@pytest.mark.parametrize("headers", [[b"Bearer k", b"Bearer other"], [b"Bearer other", b"Bearer k"]])
def test_two_different_keys_open_nothing(headers: list[bytes]) -> None:
    presented = presented_key(read_fields([(b"authorization", value) for value in headers]))

    assert presented not in (b"k", b"other")


@pytest.mark.parametrize("path", INFERENCE_PATHS)
async def test_an_inference_call_goes_straight_to_its_app(path: str) -> None:
    posts, table, _ = await ask(State(), path)

    assert (len(posts.scopes), len(table.scopes)) == (1, 0)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "post", "OPTIONS"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_another_method_is_the_tables_to_judge(path: str, method: str) -> None:
    posts, table, _ = await ask(State(), path, method)

    assert (len(posts.scopes), len(table.scopes)) == (0, 1)


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "//v1/chat/completions", "/V1/messages", "", "/"])
async def test_another_spelling_is_the_tables_to_judge_and_needs_a_key_like_any(path: str) -> None:
    open_posts, open_table, _ = await ask(State(), path)
    posts, table, sent = await ask(State(key_of("a", "sk-right")), path)

    assert (len(open_posts.scopes), len(open_table.scopes)) == (0, 1)
    assert posts.scopes == table.scopes == []
    assert sent[0]["status"] == 401


async def test_the_walk_is_told_whose_call_it_is_and_what_the_head_said() -> None:
    headers = [
        (b"authorization", b"Bearer " + KEY),
        (b"content-type", b"application/json"),
        (b"x-router-class", b"batch"),
        (b"x-request-id", b"mine"),
    ]

    posts, _, _ = await ask(State(key_of("a", "sk-right")), headers=headers)

    head: Head = posts.scopes[0][HEAD]
    assert head.request_id == "mine"
    assert [head.text(name) for name in (b"content-type", b"x-router-class", b"x-router-hop")] == [
        "application/json",
        "batch",
        None,
    ]
    assert head.key is not None
    assert (head.key.name, head.may_set) == ("a", head.key.may_set)


async def test_a_full_router_refuses_calls_and_still_answers_probes() -> None:
    state = State()
    state.tasks.update((1, 2))

    posts, table, sent = await ask(state)
    _, probed, _ = await ask(state, "/healthz", "GET")

    assert posts.scopes == table.scopes == []
    assert sent[0]["status"] == 503
    assert len(probed.scopes) == 1
    assert [(record.outcome, record.error_code) for record in state.metrics.ended] == [
        ("refused_router_full", "too_many_connections")
    ]
    assert state.metrics.arrivals == 1
