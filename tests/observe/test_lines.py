"""Log lines and a reader that does not read: whole lines or none, and never a wait."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from router.observe import lines as lines_module
from router.observe.lines import LineWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe's two ends: to read from, which does not wait, and to write to."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    for end in (reader, writer):
        with suppress(OSError):  # a test may have closed it
            os.close(end)


def line(number: int, size: int = 4_000) -> bytes:
    return f"{number:06d}".encode() + b"x" * (size - 7) + b"\n"


def read_all(reader: int) -> list[bytes]:
    """What is in the pipe now, by lines."""
    text = b""
    try:
        while part := os.read(reader, 2**20):
            text += part
    except BlockingIOError:
        pass
    return text.splitlines(keepends=True)


def fill(writer: LineWriter) -> int:
    """Write numbered lines until one is dropped. Returns how many went out."""
    number = 0
    while not writer.dropped_lines:
        writer.write(line(number))
        number += 1
    return number - 1


def test_lines_come_out_whole_and_in_order(pipe: tuple[int, int]) -> None:
    reader, file = pipe

    with closing(LineWriter(file)) as writer:
        for number in range(50):
            writer.write(line(number))

    assert read_all(reader) == [line(number) for number in range(50)]


def test_a_full_pipe_drops_whole_lines_and_counts_them(pipe: tuple[int, int]) -> None:
    reader, file = pipe

    with closing(LineWriter(file)) as writer:
        written = fill(writer)
        writer.write(line(1))
        dropped = writer.dropped_lines
        first = read_all(reader)
        writer.write(line(7))

    assert dropped == 2
    assert first == [line(number) for number in range(written)]
    assert written > 100
    assert read_all(reader) == [line(7)]


def test_the_file_that_others_share_goes_on_blocking(pipe: tuple[int, int]) -> None:
    _, file = pipe

    with closing(LineWriter(file)):
        flags = fcntl.fcntl(file, fcntl.F_GETFL)

    assert not flags & os.O_NONBLOCK


def test_a_line_longer_than_the_room_is_finished_before_the_next(pipe: tuple[int, int]) -> None:
    reader, file = pipe
    long = line(0, 3 * 2**20)

    with closing(LineWriter(file)) as writer:
        writer.write(long)
        writer.write(line(1))
        writer.write(line(2))
        begun = b"".join(read_all(reader))
        while len(begun) < len(long):
            writer.write(line(3))
            begun += b"".join(read_all(reader))
        writer.write(line(4))

    assert begun.startswith(long)
    rest = begun[len(long) :] + b"".join(read_all(reader))
    assert rest in (line(3) + line(4), line(4))
    assert writer.dropped_lines >= 2


def test_without_a_reader_lines_are_dropped_and_nothing_is_raised(pipe: tuple[int, int]) -> None:
    reader, file = pipe

    with closing(LineWriter(file)) as writer:
        os.close(reader)
        writer.write(line(0))

    assert writer.dropped_lines == 1


def test_a_socket_that_is_full_drops_lines_too() -> None:
    reader, file = socket.socketpair()
    with reader, file, closing(LineWriter(file.fileno())) as writer:
        reader.setblocking(False)

        written = fill(writer)

        got = b""
        while len(got) < written * 4_000:
            got += reader.recv(2**20)
        assert got == b"".join(line(number) for number in range(written))
        assert file.getblocking()


def test_a_pipe_that_cannot_be_opened_again_is_asked_for_room(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(lines_module, "_opened_again", refuse)
    reader, file = pipe

    with closing(LineWriter(file)) as writer:
        written = fill(writer)

    assert read_all(reader) == [line(number) for number in range(written)]


def test_what_others_write_to_the_same_file_is_not_overwritten(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb", buffering=0) as file, closing(LineWriter(file.fileno())) as writer:
        writer.write(b"one\n")
        file.write(b"another's\n")
        writer.write(b"two\n")

    assert log.read_bytes() == b"one\nanother's\ntwo\n"


def test_a_full_disk_drops_lines() -> None:
    file = os.open("/dev/full", os.O_WRONLY)
    try:
        with closing(LineWriter(file)) as writer:
            writer.write(b"one\n")
    finally:
        os.close(file)

    assert writer.dropped_lines == 1
