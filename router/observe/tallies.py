"""Counters and histograms at the price of an addition: plain numbers in memory, shown when somebody scrapes.

The client library's own look a label set up under a lock, take another for each number and search buckets one by one.
Here a label set is resolved once, to a view of its cells, and the caller adds to the cells:

    counter     [total]
    histogram   [in bucket 0, ..., in bucket n, above all, sum of values]

Rules:
- Only the event loop's thread writes.
- With a folder, the cells are a file there that belongs to the worker's slot: `SLOT.cells` has the numbers,
  `SLOT.index` says what each is, one line a label set. Whoever reads adds up all slots. Once written, a number is
  there for the others and safe from the end of its process; the next process of the slot goes on with it.
- Counting never fails a request: where no room can be had for a label set, it is counted for nothing, and logged.

Nothing here bounds label sets: that is `observe/metrics.py`'s.
"""

import logging
import mmap
import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import TypeAlias

import msgspec
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

log = logging.getLogger(__name__)

#: The numbers of one label set.
Cells: TypeAlias = "memoryview[float]"
Labels: TypeAlias = tuple[str, ...]
#: A label set, its numbers, and when it began (Unix seconds) if that is known.
Counted: TypeAlias = tuple[Labels, list[float], float | None]

_CELL_BYTES = 8
#: Memory is taken this much at a time; room for some 300 histograms. A multiple of every page size in use.
_SEGMENT_BYTES = 64 * 1024
_SEGMENT_CELLS = _SEGMENT_BYTES // _CELL_BYTES


class Series(Collector):
    """One counter or histogram (`bounds`: the upper ends of its buckets, ascending; none for a counter)."""

    def __init__(
        self, memory: "_Memory", name: str, text: str, labels: Iterable[str], bounds: tuple[float, ...] = ()
    ) -> None:
        self.name = name
        self.text = text
        self.labels = tuple(labels)
        self.bounds = bounds
        self._memory = memory
        self._size = len(bounds) + 2 if bounds else 1
        self._known: dict[Labels, tuple[Cells, float]] = {}
        if not self.labels:
            self.cells()

    @property
    def kind(self) -> str:
        return "histogram" if self.bounds else "counter"

    def cells(self, *labels: str) -> Cells:
        """Where a label set is counted, made when first asked for. Keep it: asking costs."""
        assert len(labels) == len(self.labels), f"{self.name} has labels {self.labels}"
        known = self._known.get(labels)
        if known is None:
            try:
                cells = self._memory.take(self.name, labels, self._size)
            except OSError as error:
                log.error("no room for the metric %s of %s, which is not counted: %s", self.name, labels, error)
                cells = memoryview(bytearray(self._size * _CELL_BYTES)).cast("d")
            known = self._known[labels] = (cells, time.time())
        return known[0]

    def inc(self, *labels: str) -> None:
        """Count one, where the label set changes from call to call and two look-ups are no matter."""
        known = self._known.get(labels)
        cells = self.cells(*labels) if known is None else known[0]
        cells[0] += 1

    def collect(self) -> list[Metric]:
        """What this process counted, and where it goes on with another's, both."""
        return [
            self.family((labels, list(cells), began_unix_s) for labels, (cells, began_unix_s) in self._known.items())
        ]

    def family(self, counted: Iterable[Counted]) -> Metric:
        """What a scrape shows. A label set of which nothing was counted yet is left out, if it has labels."""
        family = (HistogramMetricFamily if self.bounds else CounterMetricFamily)(
            self.name, self.text, labels=self.labels
        )
        for labels, numbers, began_unix_s in counted:
            if self.labels and not any(numbers):
                continue
            if isinstance(family, CounterMetricFamily):
                family.add_metric(labels, numbers[0])
            else:
                *in_buckets, total = numbers
                ends = map(_as_label, (*self.bounds, inf))
                family.add_metric(labels, list(zip(ends, accumulate(in_buckets), strict=True)), total)
            if began_unix_s is not None:
                named = dict(zip(self.labels, labels, strict=True))
                family.samples.append(Sample(f"{self.name}_created", named, began_unix_s))
        return family


def observe(cells: Cells, bounds: tuple[float, ...], value: float) -> None:
    """Add one value to the cells of a histogram that has these bounds."""
    cells[bisect_left(bounds, value)] += 1
    cells[-1] += value


class Tallies(Collector):
    """All series of one process. `folder`: where workers, each in its slot, keep theirs; None for a process alone."""

    def __init__(self, folder: Path | None = None, *, slot: int = 0) -> None:
        self._folder = folder
        self._memory = _Memory() if folder is None else _SharedMemory(folder, slot)
        self._series: list[Series] = []

    def counter(self, name: str, text: str, labels: Iterable[str]) -> Series:
        return self.histogram(name, text, labels, ())

    def histogram(self, name: str, text: str, labels: Iterable[str], bounds: tuple[float, ...]) -> Series:
        series = Series(self._memory, name, text, labels, bounds)
        self._series.append(series)
        return series

    def collect(self) -> Iterator[Metric]:
        """The families, in the order they were made; with a folder, of all workers together."""
        if self._folder is None:
            for series in self._series:
                yield from series.collect()
            return
        sums = _sums(self._folder)
        for series in self._series:
            by_labels = sums.get(series.name, {})
            yield series.family((labels, by_labels[labels], None) for labels in sorted(by_labels))


class _Memory:
    """Cells of this process alone."""

    def __init__(self) -> None:
        self._segments: dict[int, Cells] = {}
        self._next = 0

    def take(self, name: str, labels: Labels, size: int) -> Cells:  # noqa: ARG002  # a file has to know whose they are
        first = self._room(size)
        self._next = first + size
        return self._view(first, size)

    def _room(self, size: int) -> int:
        """The next cell from which `size` cells lie in one segment."""
        assert size <= _SEGMENT_CELLS, "a label set fits into a segment"
        left = _SEGMENT_CELLS - self._next % _SEGMENT_CELLS
        return self._next if size <= left else self._next + left

    def _view(self, first: int, size: int) -> Cells:
        number, start = divmod(first, _SEGMENT_CELLS)
        segment = self._segments.get(number)
        if segment is None:
            segment = self._segments[number] = memoryview(self._map(number)).cast("d")
        return segment[start : start + size]

    def _map(self, number: int) -> mmap.mmap:  # noqa: ARG002  # a file has to know which it is
        return mmap.mmap(-1, _SEGMENT_BYTES)


class _SharedMemory(_Memory):
    """Cells in a slot's file. What a process before this one counted there is gone on with."""

    def __init__(self, folder: Path, slot: int) -> None:
        super().__init__()
        self._file = folder / f"{slot}.cells"
        self._index = folder / f"{slot}.index"
        self._kept: dict[tuple[str, Labels], tuple[int, int]] = {}
        if self._index.exists():
            # A process that was killed while it wrote a line leaves a part of it.
            os.truncate(self._index, self._index.read_bytes().rfind(b"\n") + 1)
        for name, labels, first, size in _entries(self._index):
            self._kept[name, labels] = (first, size)
            self._next = first + size

    def take(self, name: str, labels: Labels, size: int) -> Cells:
        kept = self._kept.get((name, labels))
        if kept is not None:
            return self._view(*kept)
        first = self._room(size)
        cells = self._view(first, size)
        with self._index.open("ab", buffering=0) as index:
            index.write(msgspec.json.encode((name, labels, first, size)) + b"\n")
        self._next = first + size
        return cells

    def _map(self, number: int) -> mmap.mmap:
        file = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Not a hole in the file: a page that a full disk cannot give would end the process when it is written.
            os.posix_fallocate(file, number * _SEGMENT_BYTES, _SEGMENT_BYTES)
            return mmap.mmap(file, _SEGMENT_BYTES, offset=number * _SEGMENT_BYTES)
        finally:
            os.close(file)


def _sums(folder: Path) -> dict[str, dict[Labels, list[float]]]:
    """The numbers of every series by label set, all slots added up."""
    sums: dict[str, dict[Labels, list[float]]] = {}
    for index in folder.glob("*.index"):
        # The index first: what it names is in the cells by then.
        entries = list(_entries(index))
        cells = memoryview(_bytes_of(index.with_suffix(".cells"))).cast("d")
        for name, labels, first, size in entries:
            numbers = list(cells[first : first + size])
            if len(numbers) < size:
                break  # The folder is just being taken away.
            by_labels = sums.setdefault(name, {})
            before = by_labels.get(labels)
            by_labels[labels] = numbers if before is None else [a + b for a, b in zip(before, numbers, strict=True)]
    return sums


def _entries(index: Path) -> Iterator[tuple[str, Labels, int, int]]:
    whole, _, _ = _bytes_of(index).rpartition(b"\n")
    for line in whole.splitlines():
        yield msgspec.json.decode(line, type=tuple[str, Labels, int, int])


def _bytes_of(file: Path) -> bytes:
    """Nothing where it is not there any more: the folder goes with the process that made it."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


def _as_label(bound: float) -> str:
    label: str = floatToGoString(bound)  # type: ignore[no-untyped-call]  # no stubs
    return label
