"""How a report looks in a terminal. Shows what it is given and computes nothing."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.sim.measures import Stats, percent_word
from router.sim.report import Report, Summary

_METRICS = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "E2EL"), ("queue_wait", "queue wait"))


def report_tables(report: Report) -> RenderableType:
    """The whole report: counts, latencies in milliseconds, failures, and what to be careful about."""
    rows: Mapping[str, Summary] = {
        **{request_class.value: summary for request_class, summary in report.classes.items()},
        "total": report.total,
    }
    parts: list[RenderableType] = [_counts(rows), _latencies(rows)]
    if report.errors:
        parts.append(_errors(report))
    parts += [Text(f"{name}: {note}", style="dim") for name, summary in rows.items() for note in summary.notes]
    if report.total.late_sends:
        late = f"{report.total.late_sends} requests were sent late: this machine, not the server, was behind"
        parts.append(Text(late, style="yellow"))
    return Group(*parts)


def _counts(rows: Mapping[str, Summary]) -> Table:
    table = Table(title="requests")
    table.add_column("class")
    for heading in ("arrivals", "completed", "failed", "req/s", "goodput req/s", "output tok/s", "total tok/s"):
        table.add_column(heading, justify="right")
    for name, summary in rows.items():
        fields = summary.fields()
        goodput = fields["request_goodput"]
        table.add_row(
            name,
            str(summary.arrivals),
            str(summary.completed),
            Text(str(summary.failed), style="red" if summary.failed else ""),
            f"{fields['request_throughput']:.2f}",
            "-" if goodput is None else f"{goodput:.2f}",
            f"{fields['output_throughput']:.1f}",
            f"{fields['total_token_throughput']:.1f}",
        )
    return table


def _latencies(rows: Mapping[str, Summary]) -> Table:
    table = Table(title="latency of completed requests, ms from the intended time")
    table.add_column("class")
    table.add_column("metric")
    percents = [percent for percent, _ in next(iter(rows.values())).metrics["ttft"].percentiles]
    for heading in ("mean", "median", "std", *map(percent_word, percents)):
        table.add_column(heading, justify="right")
    for name, summary in rows.items():
        for metric, title in _METRICS:
            stats = summary.metrics[metric]
            if stats.samples:
                table.add_row(name, title, *_figures(stats))
        table.add_section()
    return table


def _figures(stats: Stats) -> list[str]:
    values = (stats.mean, stats.median, stats.std, *(value for _, value in stats.percentiles))
    return [f"{value:.1f}" for value in values]


def _errors(report: Report) -> Table:
    table = Table(title="not completed")
    for heading in ("class", "outcome", "reason"):
        table.add_column(heading, overflow="fold")
    table.add_column("count", justify="right")
    for request_class, outcome, reason, count in report.errors:
        table.add_row(request_class, outcome, Text(reason), str(count))
    return table
