"""What the router costs, beside vllm-router and nginx, in one run on one machine: python bench/overhead.py

Two fake engines answer at once; each proxy spreads a 1 KiB chat request over them. The proxies are measured in slices
by turns, so that noise meets all alike. The router has everything on: the body is parsed, its tokens counted, the class
and a place in the ledger decided, a record kept and its metrics written; like vllm-router it logs warnings only.

Exit codes: 0 measured, 1 something failed, 3 with --check where a target is missed.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import machine
from bench.children import free_port
from bench.proxies import (
    VLLM_ROUTER_VERSION,
    Missing,
    Mock,
    Proxy,
    mocks,
    nginx,
    round_robin_conf,
    router,
    router_config,
    tokenizer_folder,
    vllm_router,
)
from bench.script import measured, show
from bench.yardstick.cost import pss_mib
from bench.yardstick.load import Load, Outcome, send
from bench.yardstick.measure import Slice, Spread, added_us, measure

OURS, OURS_TOKENIZER, PEER, NGINX = "router", "router_tokenizer", "vllm_router", "nginx"
CONNECTIONS = 64
TTFT_US = INTERVAL_US = 20_000
_LATENCY_SLICES = 3
#: ours over vllm-router's: at least 1 for work done for a CPU-second, at most 2 for time added.
TARGETS = {
    "requests_per_cpu_s_ratio": (">=", 1.0),
    "events_per_cpu_s_ratio": (">=", 1.0),
    "added_latency_p50_ratio": ("<=", 2.0),
    "added_latency_p99_ratio": ("<=", 2.0),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often. One round takes each proxy through each load once. `stagger_us` lies between the starts
    of streams: at 0 their tokens come together, as those of one engine's step do."""

    rounds: int
    requests_s: float
    streams_s: float
    latency_s: float
    tokens: int
    stagger_us: int = 0

    def streams(self) -> Load:
        return Load(CONNECTIONS, self.streams_s, is_stream=True, tokens=self.tokens, stagger_us=self.stagger_us)


FULL = Plan(rounds=3, requests_s=2.0, streams_s=1.6, latency_s=0.4, tokens=60)
QUICK = Plan(rounds=2, requests_s=0.8, streams_s=0.8, latency_s=0.3, tokens=40)


@dataclass(slots=True)
class Measured:
    """All slices of one proxy. Its `direct_*` are the engine's own, taken right before."""

    proxy: Proxy
    requests: list[Slice] = field(default_factory=list)
    streams: list[Slice] = field(default_factory=list)
    alone: list[Slice] = field(default_factory=list)
    alone_direct: list[Outcome] = field(default_factory=list)
    streams_direct: list[Outcome] = field(default_factory=list)
    pss_mib: float = 0.0

    def figures(self) -> dict[str, Any]:
        """As JSON values; a figure is its median, least and most over slices."""
        alone = list(zip((slice_.outcome for slice_ in self.alone), self.alone_direct, strict=True))
        streams = list(zip((slice_.outcome for slice_ in self.streams), self.streams_direct, strict=True))
        spreads = {
            "requests_per_cpu_s": Spread.of(each.requests_per_cpu_s for each in self.requests),
            "events_per_cpu_s": Spread.of(each.events_per_cpu_s for each in self.streams),
            "added_latency_p50_us": Spread.of(added_us(*pair, "p50") for pair in alone),
            "added_latency_p99_us": Spread.of(added_us(*pair, "p99") for pair in alone),
            "added_ttft_p50_us": Spread.of(added_us(*pair, "p50", to_first_token=True) for pair in streams),
            "added_ttft_p99_us": Spread.of(added_us(*pair, "p99", to_first_token=True) for pair in streams),
            "requests_per_s": Spread.of(each.requests_per_s for each in self.requests),
            "kernel_ratio": Spread.of(each.kernel_ratio for each in self.requests),
        }
        slices = [*self.requests, *self.streams, *self.alone]
        firsts = [slice_.outcome.first_error for slice_ in slices if slice_.outcome.first_error]
        return {
            "version": self.proxy.version or None,
            **{name: None if spread is None else asdict(spread) for name, spread in spreads.items()},
            "cpu_us_per_request": _inverse_us(spreads["requests_per_cpu_s"]),
            "cpu_us_per_event": _inverse_us(spreads["events_per_cpu_s"]),
            "pss_mib": round(self.pss_mib, 1),
            "requests_ok": sum(slice_.outcome.ok for slice_ in slices),
            "failures": sum(slice_.outcome.failures for slice_ in slices),
            "first_error": firsts[0] if firsts else None,
        }


def _inverse_us(spread: Spread | None) -> float | None:
    return None if spread is None else round(1e6 / spread.median, 2)


def take_round(engines: list[Mock], subjects: dict[str, Measured], plan: Plan) -> None:
    """Each load in turn on each proxy."""
    for engine in engines:
        engine.set(ttft_us=0, interval_us=0)
    for one in subjects.values():
        load = Load(CONNECTIONS, plan.requests_s)
        one.requests.append(measure(one.proxy.port, one.proxy.pid, load))
    # Short and often: one busy moment of the machine is a tail of its own.
    for one in [*subjects.values()] * _LATENCY_SLICES:
        load = Load(1, plan.latency_s)
        one.alone_direct.append(send(engines[0].port, load))
        one.alone.append(measure(one.proxy.port, one.proxy.pid, load))
    for engine in engines:
        engine.set(ttft_us=TTFT_US, interval_us=INTERVAL_US)
    load = plan.streams()
    direct = send(engines[0].port, load)
    for one in subjects.values():
        one.streams_direct.append(direct)
        one.streams.append(measure(one.proxy.port, one.proxy.pid, load))


def run(plan: Plan, folder: Path) -> dict[str, Any]:
    """Start everything, measure it, stop it. The report as JSON values."""
    absent: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        engines = stack.enter_context(mocks(folder))
        config = router_config(engines)
        subjects = {OURS: Measured(stack.enter_context(router(config, folder)))}
        for name, peer in _others(engines, folder):
            try:
                subjects[name] = Measured(stack.enter_context(peer))
            except Missing as error:
                absent[name] = str(error)
        for each in subjects.values():
            send(each.proxy.port, Load(CONNECTIONS, min(1.0, plan.requests_s)))
        for number in range(plan.rounds):
            sys.stderr.write(f"round {number + 1} of {plan.rounds}: {', '.join(subjects)}\n")
            take_round(engines, subjects, plan)
        for each in subjects.values():
            each.pss_mib = pss_mib(each.proxy.pid)
        figures: dict[str, Any] = {name: one.figures() for name, one in subjects.items()}
    for name, reason in absent.items():
        sys.stderr.write(f"{name} is not measured: {reason}\n")
        figures[name] = None
    return {
        **ratios(figures[OURS], figures.get(PEER)),
        "router_tokenizer_ratios": ratios(figures.get(OURS_TOKENIZER), figures.get(PEER)),
        "targets": {name: f"{relation} {limit}" for name, (relation, limit) in TARGETS.items()},
        "proxies": figures,
        "not_measured": absent,
        "vllm_router_version": VLLM_ROUTER_VERSION,
        "router_config": config,
        "plan": asdict(plan) | {"connections": CONNECTIONS, "ttft_us": TTFT_US, "interval_us": INTERVAL_US},
        "machine": machine.describe(),
    }


def _others(engines: list[Mock], folder: Path) -> Iterator[tuple[str, Any]]:
    yield PEER, vllm_router(engines, folder)
    port = free_port()
    yield NGINX, nginx(round_robin_conf(engines, port), port, folder)
    yield OURS_TOKENIZER, _router_with_tokenizer(engines, folder)


@contextlib.contextmanager
def _router_with_tokenizer(engines: list[Mock], folder: Path) -> Iterator[Proxy]:
    model = tokenizer_folder(folder / "model")
    config = router_config(engines, tokenizer={"kind": "huggingface", "path": str(model)})
    with router(config, folder, name="router-tokenizer") as proxy:
        yield proxy


def ratios(ours: dict[str, Any] | None, peer: dict[str, Any] | None) -> dict[str, float | None]:
    """Ours over vllm-router's, of medians; null where one of them is not there."""
    found: dict[str, float | None] = {}
    for name in TARGETS:
        figure = name.removesuffix("_ratio")
        figure = f"{figure}_us" if figure.startswith("added") else figure
        one, other = (ours or {}).get(figure), (peer or {}).get(figure)
        found[name] = round(one["median"] / other["median"], 3) if one and other and other["median"] > 0 else None
    return found


def missed(report: dict[str, Any]) -> list[str]:
    """The targets that the report misses; one that could not be measured is missed."""
    found = []
    for name, (relation, limit) in TARGETS.items():
        value = report[name]
        if value is None or (value < limit if relation == ">=" else value > limit):
            found.append(f"{name} is {value}, wanted {relation} {limit}")
    return found


def profile(plan: Plan, folder: Path) -> dict[str, Any]:
    """Where the router's CPU time goes, by layer: one run of each load under the sampling profiler."""
    found: dict[str, Any] = {}
    for name, load in (
        ("requests", Load(CONNECTIONS, 2 * plan.requests_s)),
        ("streams", replace(plan.streams(), seconds=2 * plan.requests_s)),
    ):
        sys.stderr.write(f"profiling {name}\n")
        inside = folder / f"profile-{name}"
        inside.mkdir()
        out = inside / "samples.json"
        launch = (str(Path(__file__).parent / "profile_router.py"), str(out))
        with mocks(inside) as engines, router(router_config(engines), inside, launch=launch) as proxy:
            for engine in engines:
                engine.set(ttft_us=TTFT_US, interval_us=INTERVAL_US)
            taken = measure(proxy.port, proxy.pid, load)
        sampled = json.loads(out.read_text())
        done = taken.outcome.events if load.is_stream else taken.outcome.ok
        found[name] = sampled | {"done": done, "cpu_s": taken.used.total_s, "kernel_ratio": taken.kernel_ratio}
    return found


_COLUMNS = (
    ("requests per CPU-s", "requests_per_cpu_s", 1.0, ",.0f"),
    ("CPU us/request", "cpu_us_per_request", 1.0, ".0f"),
    ("events per CPU-s", "events_per_cpu_s", 1.0, ",.0f"),
    ("CPU us/event", "cpu_us_per_event", 1.0, ".1f"),
    ("added p50 ms", "added_latency_p50_us", 1e-3, ".3f"),
    ("added p99 ms", "added_latency_p99_us", 1e-3, ".3f"),
    ("added TTFT ms", "added_ttft_p50_us", 1e-3, ".2f"),
    ("in kernel", "kernel_ratio", 1.0, ".0%"),
    ("PSS MiB", "pss_mib", 1.0, ".0f"),
    ("failures", "failures", 1.0, ".0f"),
)


def table(report: dict[str, Any]) -> str:
    """For people: proxies down, figures across, medians with their range where it is wider than a tenth."""
    rows = [["", *(title for title, *_ in _COLUMNS)]]
    for name, figures in report["proxies"].items():
        if figures is None:
            rows.append([name, f"not measured: {report['not_measured'][name].splitlines()[0]}"])
            continue
        rows.append([name, *(_cell(figures[key], scale, form) for _, key, scale, form in _COLUMNS)])
    widths = [max(len(row[at]) for row in rows if len(row) == len(rows[0])) for at in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in rows]
    lines += ["", *(f"{name}: {report[name]} (wanted {report['targets'][name]})" for name in TARGETS)]
    for load, sampled in (report.get("profile") or {}).items():
        lines += ["", f"where the router's time goes, {load} ({sampled['kernel_ratio']:.0%} of it in the kernel):"]
        lines += [f"  {count / sampled['samples']:6.1%}  {name}" for name, count in sampled["layers"].items()]
        lines += [f"      {count / sampled['samples']:6.1%}  {name}" for name, count in sampled["lines"][:12]]
    return "\n".join(lines)


def _cell(value: Any, scale: float, form: str) -> str:
    if value is None:
        return "-"
    if not isinstance(value, dict):
        return format(value * scale, form)
    text = format(value["median"] * scale, form)
    if value["most"] - value["least"] > 0.1 * abs(value["median"]):
        text += f" ({format(value['least'] * scale, form)} to {format(value['most'] * scale, form)})"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about 20 s, for a first look")
    parser.add_argument("--stagger-us", type=int, default=0, help="between the starts of streams (0: all at once)")
    parser.add_argument("--profile", action="store_true", help="also say where the router's time goes")
    parser.add_argument("--check", action="store_true", help="exit code 3 where a target is missed")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of a table")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()
    plan = replace(QUICK if arguments.quick else FULL, stagger_us=arguments.stagger_us)

    def measure_all(folder: Path) -> dict[str, Any]:
        report = run(plan, folder)
        return {**report, "profile": profile(plan, folder)} if arguments.profile else report

    report = measured("overhead", measure_all)
    show(report, arguments.out, json.dumps(report) if arguments.json else table(report))
    failures = {name: one["failures"] for name, one in report["proxies"].items() if one and one["failures"]}
    if failures:
        sys.stderr.write(f"overhead: requests failed: {failures}\n")
        return 1
    misses = missed(report)
    if misses and arguments.check:
        sys.stderr.write("\n".join(misses) + "\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
