"""Latency against rate, as a picture. Needs matplotlib, which the extra `bench` brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.measure import Distribution, Slo
from bench.report import Point, targets_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    """Rates, ascending, and the median over repetitions of one percentile of one latency, where it
    was measured."""
    by_rate: dict[float, list[float]] = {}
    for point in points:
        told: Distribution = getattr(point.summary, name)
        if point.target == target and told.count:
            by_rate.setdefault(point.rate, []).append(getattr(told, share))
    rates = sorted(by_rate)
    return rates, [_median(by_rate[rate]) for rate in rates]


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _draw(axis: Axes, points: Sequence[Point], name: str) -> None:
    for index, target in enumerate(targets_of(points)):
        for share, style in _SHARES:
            rates, values = series(points, target, name, share)
            axis.plot(
                rates, values, style, color=f"C{index}", marker=".", label=f"{target} {share}"
            )
    axis.set_xlabel("requests/s offered")
    axis.set_ylabel(f"{name.removesuffix('_ms').upper()}, ms")
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
