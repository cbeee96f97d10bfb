"""What the router says of itself at a moment: its series, its engines' states, its files, its memory."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

__all__ = ["Series", "engine_states", "open_files", "open_sockets", "series"]


@dataclass(frozen=True, slots=True)
class Series:
    """One look at `/metrics`."""

    samples: tuple[Sample, ...]

    def total(self, name: str, **labels: str) -> float:
        """The sum over the samples that carry these labels; 0 where there is none."""
        return sum(one.value for one in self.samples if one.name == name and labels.items() <= one.labels.items())

    def buckets(self, name: str) -> dict[float, float]:
        """How many observations of the histogram were at most as large as each bound, over all labels."""
        found: dict[float, float] = {}
        for one in self.samples:
            if one.name == f"{name}_bucket":
                bound = float(one.labels["le"])
                found[bound] = found.get(bound, 0.0) + one.value
        return dict(sorted(found.items()))


def series(url: str) -> Series:
    """Read `/metrics` of the router at `url`. Raises: `OSError`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return Series(tuple(sample for family in text_string_to_metric_families(text) for sample in family.samples))


def engine_states(url: str) -> dict[str, str]:
    """Each engine's state by `/readyz`; a 503 there has it too. Raises: `OSError` where nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
            body = json.load(answer)
    except urllib.error.HTTPError as error:
        body = json.load(error)
    return {name: state for model in body["models"].values() for name, state in model["engines"].items()}


def open_files(pid: int) -> int:
    """Files, sockets among them, that the process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def open_sockets(pid: int) -> int:
    """Sockets that the process has open."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += str(entry.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue
    return count
