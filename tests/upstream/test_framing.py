"""Bytes to events: nothing lost, nothing cut wrong, nothing held without bound."""

import random
import re

import pytest

from router.upstream import framing
from router.upstream.framing import Event, EventSplitter

TEXT = '{"choices":[{"delta":{"content":"你好 🙂 ok"}}]}'.encode()


def stream(end: bytes) -> bytes:
    """A stream with everything the format knows, in lines that end in `end`."""
    lines = [
        b": keep-alive",
        b"",
        b"data: " + TEXT,
        b"",
        b"event: message_delta",
        b"data: one",
        b"data:two",
        b"id: 7",
        b"",
        b"retry: 3000",
        b"",
        b"data: [DONE]",
        b"",
    ]
    return end.join(lines) + end


def split(data: bytes, *cuts: int, max_event_bytes: int = 1 << 20) -> list[Event]:
    splitter = EventSplitter(max_event_bytes)
    events: list[Event] = []
    for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
        events += splitter.feed(data[start:end])
    return events + splitter.flush()


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
def test_a_stream_cut_at_any_byte_gives_the_same_events_and_the_same_bytes(end: bytes) -> None:
    data = stream(end)
    whole = split(data)

    for cut in range(len(data) + 1):
        events = split(data, cut)

        assert events == whole
        assert b"".join(event.raw for event in events) == data


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
def test_a_stream_fed_one_byte_at_a_time_gives_the_same_events(end: bytes) -> None:
    data = stream(end)

    events = split(data, *range(1, len(data)))

    assert events == split(data)
    assert [event.kind for event in events] == ["comment", "data", "data", "comment", "data"]


def test_mixed_line_ends_and_stray_blank_lines_survive_every_cut_into_three() -> None:
    data = b"\n\r\ndata: a\r\rdata: b\n\r\n\ndata: c\r\n\rdata: d\n\n\n"
    whole = split(data)

    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            assert split(data, first, second) == whole

    assert b"".join(event.raw for event in whole) == data
    assert [event.data for event in whole if event.kind == "data"] == [b"a", b"b", b"c", b"d"]


def test_random_bytes_cut_at_random_come_back_whole() -> None:
    rng = random.Random(7)
    for _ in range(300):
        data = bytes(rng.choices(b"\n\r:a data", k=rng.randint(0, 60)))
        cuts = sorted(rng.choices(range(len(data) + 1), k=4))
        splitter = EventSplitter()

        events: list[Event] = []
        for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
            events += splitter.feed(data[start:end])
        tail = splitter.flush()

        raw = b"".join(event.raw for event in events)
        assert (raw + b"".join(event.raw for event in tail)).startswith(data)
        assert events == split(data)[: len(events)]


class Searches(bytearray):
    """A buffer that counts the bytes that are searched for a line end."""

    searched_bytes = 0

    def find(self, wanted: bytes, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]  # less
        stop = len(self) if end is None else end
        at = super().find(wanted, start, stop)
        self.searched_bytes += (stop if at < 0 else at + 1) - start
        return at


@pytest.mark.parametrize("line", [b"a\r", b"a\n", b"a\r\n", b"a\r\r", b"a\r\ra\n"])
def test_the_work_on_a_chunk_grows_with_its_size_alone(line: bytes) -> None:
    splitter = EventSplitter()
    splitter._buffer = buffer = Searches(b"data: begun")

    for _ in range(3):
        splitter.feed(line * 5_000)

    assert buffer.searched_bytes < 5 * 3 * 5_000 * len(line)


def test_fields_are_found_wherever_lines_end_and_only_there() -> None:
    rng = random.Random(11)
    pieces = [b"data", b"event", b":", b" ", b"\r", b"\n", b"\r\n", b"x", b"\xef\xbb\xbf"]
    for _ in range(20_000):
        raw = b"".join(rng.choices(pieces, k=rng.randint(1, 9)))
        fields = [
            (name, value.removeprefix(b" "))
            for line in re.split(rb"\r\n|\r|\n", raw.removeprefix(b"\xef\xbb\xbf"))
            for name, _, value in [line.partition(b":")]
        ]
        values = [value for name, value in fields if name == b"data"]
        names = [value.decode("utf-8", "replace") for name, value in fields if name == b"event" and value]

        assert (framing._kind(raw) == "data") == bool(values)
        assert Event(raw, "data").data == b"\n".join(values)
        assert Event(raw, "data").event == (names[-1] if names else "message")


def test_an_event_tells_its_name_and_joins_its_data_lines() -> None:
    event = split(b"event: error\ndata: one\ndata:two\nid: 7\n\n")[0]

    assert (event.event, event.data, event.is_comment) == ("error", b"one\ntwo", False)


def test_an_event_is_handed_out_as_soon_as_its_blank_line_is_here() -> None:
    for data in (b"data: x\n\n", b"data: x\r\n\r\n", b"data: x\r\r"):
        assert [event.raw for event in EventSplitter().feed(data)] == [data]


@pytest.mark.parametrize(
    ("tail", "completed"),
    [
        (b"data: x", b"data: x\n\n"),
        (b"data: x\n", b"data: x\n\n"),
        (b"data: x\r\n", b"data: x\r\n\n"),
        (b"data: x\r", b"data: x\r\n\n"),
    ],
)
def test_a_last_event_without_its_blank_line_is_completed_at_the_end(tail: bytes, completed: bytes) -> None:
    splitter = EventSplitter()
    fed = splitter.feed(b"data: first\n\n" + tail)

    flushed = splitter.flush()

    assert [event.raw for event in fed + flushed] == [b"data: first\n\n", completed]
    assert flushed[0].data == b"x"
    assert splitter.flush() == []


def test_an_event_over_the_limit_passes_in_opaque_pieces_and_the_next_is_read_again() -> None:
    big = b"data: " + b"x" * 5000 + b"\n\n"
    data = b"data: a\n\n" + big + b"data: b\n\n"
    splitter = EventSplitter(max_event_bytes=1000)

    events: list[Event] = []
    held = 0
    for start in range(0, len(data), 100):
        events += splitter.feed(data[start : start + 100])
        held = max(held, start + 100 - sum(len(event.raw) for event in events))

    assert b"".join(event.raw for event in events) == data
    assert [event.raw for event in events if event.kind == "data"] == [b"data: a\n\n", b"data: b\n\n"]
    assert held <= 1100


def test_an_event_over_the_limit_is_opaque_also_where_it_comes_in_one_chunk() -> None:
    for end in (b"\n", b"\r\n"):
        big = b"data: " + b"x" * 5000 + end + end

        assert [event.kind for event in split(big, max_event_bytes=1000)] == ["opaque"]


# -- chunks that need no look -------------------------------------------------------------------------------------

TOKEN = b"data: " + TEXT + b"\n\n"


@pytest.mark.parametrize(
    ("chunk", "events"),
    [
        (TOKEN, 1),
        (TOKEN * 5, 5),
        (b"data: [DONE]\n\n", 1),
        (b"data:x\ndata: y\n\n" + TOKEN, 2),
        (b'data: {"choices":[],"usage":null}\n\n' * 2, 2),
        (TOKEN.replace(b"ok", b'\\"usage\\" \\"error\\"'), 1),
        (b"", None),
        (TOKEN[:-1], None),
        (TOKEN[1:], None),
        (TOKEN + b"\n", None),
        (TOKEN + b"\n" + TOKEN, None),
        (TOKEN + b": ping\n\n", None),
        (b": ping\n\n" + TOKEN, None),
        (b"event: x\n" + TOKEN, None),
        (TOKEN.replace(b"\n", b"\r\n"), None),
        (TOKEN + b"data: a\r\r\n\n", None),
        (b'data: {"usage":{"prompt_tokens":1}}\n\n', None),
        (b'data: {"usage":null}\n\ndata: {"usage": {}}\n\n', None),
        (b'data: {"error":{"code":500}}\n\n', None),
        (b'data: {"choices":[{"finish_reason":"abort"}]}\n\n', None),
    ],
)
def test_a_chunk_of_whole_data_events_with_nothing_to_tell_needs_no_look(chunk: bytes, events: int | None) -> None:
    assert EventSplitter().split_plain(chunk) == events


@pytest.mark.parametrize("pending", [b"d", b"data: x\n", b"\r", b"data: x\n\r", b"data: " + b"x" * 2000])
def test_what_follows_an_unfinished_event_has_to_be_fed(pending: bytes) -> None:
    splitter = EventSplitter(max_event_bytes=1000)
    splitter.feed(pending)

    assert splitter.split_plain(TOKEN) is None


def test_an_event_over_the_limit_has_to_be_fed() -> None:
    assert EventSplitter(max_event_bytes=10).split_plain(TOKEN) is None


def test_chunks_that_need_no_look_are_the_same_events_as_when_they_are_fed() -> None:
    rng = random.Random(3)
    for _ in range(3_000):
        chunk = b"data:" + bytes(rng.choices(b"\n\r: ad", (6, 1, 1, 1, 1, 1), k=rng.randint(0, 30))) + b"\n\n"
        fed = EventSplitter()

        events = EventSplitter().split_plain(chunk)

        if events is not None:
            assert [event.kind for event in fed.feed(chunk)] == ["data"] * events
            assert fed.flush() == []
