"""Results of a load: the points measured, as a table, as JSON, and as a picture, which needs
matplotlib (the extra `bench`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.measure import Distribution, Slo, Summary, goodputs_of
from bench.suite.markdown import number, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Point:
    """One load against one target. rate: mean requests/s offered."""

    target: str
    rate: float
    repetition: int
    summary: Summary


def points_table(document: Mapping[str, Any]) -> str:
    """Markdown, a line for each point; latencies are p50, p90 and p99."""
    headings = ("Target", "requests/s", "Done", "tokens/s", "In SLO", "TTFT, ms", "TPOT, ms")
    rows = []
    for point in document["points"]:
        summary = point["summary"]
        rows.append(
            [
                point["target"],
                f"{point['rate']:g}",
                f"{summary['num_complete']}/{summary['num_requests']}",
                number(summary["output_tokens_per_s"]),
                f"{summary['slo_attainment']:.0%}",
                *(_triple(summary[key]) for key in ("ttft_ms", "tpot_ms", "itl_ms")),
            ]
        )
    return table((*headings, "ITL, ms"), rows)


def goodputs(points: Sequence[Point], wanted: float) -> dict[str, float | None]:
    """Goodput by target, in order of first appearance; see bench.measure.goodput."""
    return goodputs_of([(p.target, p.rate, p.summary.slo_attainment) for p in points], wanted)


def goodput_lines(points: Sequence[Point], slo: Slo, wanted: float) -> list[str]:
    """One line per target; none without an SLO."""
    if slo.ttft_ms is None and slo.tpot_ms is None:
        return []
    terms = [
        f"{name} <= {limit:g} ms"
        for name, limit in (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms))
        if limit is not None
    ]
    lines = []
    for target, rate in goodputs(points, wanted).items():
        rates = [point.rate for point in points if point.target == target]
        if rate is None:
            highest = f"below {min(rates):g} requests/s, the lowest rate measured"
        elif rate == max(rates):
            highest = f"at least {rate:g} requests/s, the highest rate measured"
        else:
            highest = f"{rate:g} requests/s"
        lines.append(f"goodput of {target}: {highest} ({wanted:.0%} with {' and '.join(terms)})")
    return lines


def data_of(points: Sequence[Point], slo: Slo, wanted: float) -> dict[str, Any]:
    """All results as plain values."""
    return {
        "slo": {**dataclasses.asdict(slo), "wanted_attainment": wanted},
        "goodput_requests_per_s": goodputs(points, wanted),
        "points": [dataclasses.asdict(point) for point in points],
    }


def _triple(times: Mapping[str, float]) -> str:
    return (
        " / ".join(number(times[key]) for key in ("p50", "p90", "p99")) if times["count"] else "-"
    )


_SHARES = (("p50", "-"), ("p90", "--"), ("p99", ":"))


def plot(points: Sequence[Point], slo: Slo, title: str, path: Path) -> None:
    """Write a PNG with TTFT and TPOT (p50, p90, p99) against the offered rate, one colour per
    target.

    Repetitions of a rate are drawn by their median. Raises OSError; ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, name, limit in zip(
        axes, ("ttft_ms", "tpot_ms"), (slo.ttft_ms, slo.tpot_ms), strict=True
    ):
        _draw(axis, points, name)
        if limit is not None:
            axis.axhline(limit, color="grey", linewidth=1, label="SLO")
    axes[0].legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, format="png", dpi=120)


def series(
    points: Sequence[Point], target: str, name: str, share: str
) -> tuple[list[float], list[float]]:
    """Rates, ascending, and for each the median over repetitions of one percentile of one
    latency."""
    by_rate: dict[float, list[float]] = {}
    for point in points:
        values: Distribution = getattr(point.summary, name)
        if point.target == target and values.count:
            by_rate.setdefault(point.rate, []).append(getattr(values, share))
    rates = sorted(by_rate)
    return rates, [median(by_rate[rate]) for rate in rates]


def _draw(axis: Axes, points: Sequence[Point], name: str) -> None:
    for index, target in enumerate(dict.fromkeys(point.target for point in points)):
        for share, style in _SHARES:
            rates, values = series(points, target, name, share)
            axis.plot(
                rates, values, style, color=f"C{index}", marker=".", label=f"{target} {share}"
            )
    axis.set_xlabel("requests/s offered")
    axis.set_ylabel(f"{name.removesuffix('_ms').upper()}, ms")
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
