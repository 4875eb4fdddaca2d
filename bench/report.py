"""Results of a load: the points measured, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from bench.measure import Distribution, Slo, Summary, goodput

_COLUMNS = ("target", "rate/s", "done", "tok/s", "in SLO", "", "TTFT", "TPOT", "ITL ms")


@dataclass(frozen=True, slots=True)
class Point:
    """One load against one target. rate: requests/s offered, in the mean."""

    target: str
    rate: float
    repetition: int
    summary: Summary


def table_of(points: Sequence[Point]) -> Table:
    """Three lines per point: p50, p90 and p99 of the latencies, in milliseconds."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in _COLUMNS:
        justify: Literal["left", "right"] = "left" if heading == "target" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for point in points:
        told = point.summary
        table.add_row(
            point.target,
            f"{point.rate:g}",
            f"{told.num_complete}/{told.num_requests}",
            f"{told.output_tokens_per_s:.1f}",
            f"{told.slo_attainment:.0%}",
            "p50\np90\np99",
            _triple(told.ttft_ms),
            _triple(told.tpot_ms),
            _triple(told.itl_ms),
        )
    return table


def targets_of(points: Sequence[Point]) -> list[str]:
    """Names of the targets, in the order of their first point."""
    return list(dict.fromkeys(point.target for point in points))


def goodput_of(points: Sequence[Point], target: str, wanted: float) -> float | None:
    """Of one target; see bench.measure.goodput."""
    return goodput(
        [(p.rate, p.summary.slo_attainment) for p in points if p.target == target], wanted
    )


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
    for target in targets_of(points):
        rate = goodput_of(points, target, wanted)
        rates = [point.rate for point in points if point.target == target]
        if rate is None:
            told = f"below {min(rates):g} requests/s, the lowest rate measured"
        elif rate == max(rates):
            told = f"at least {rate:g} requests/s, the highest rate measured"
        else:
            told = f"{rate:g} requests/s"
        lines.append(f"goodput of {target}: {told} ({wanted:.0%} with {' and '.join(terms)})")
    return lines


def document_of(
    points: Sequence[Point], slo: Slo, wanted: float, about: dict[str, Any]
) -> dict[str, Any]:
    """All results as plain values. about: where, when and how they were made."""
    return {
        **about,
        "slo": {**dataclasses.asdict(slo), "wanted_attainment": wanted},
        "goodput_requests_per_s": {
            target: goodput_of(points, target, wanted) for target in targets_of(points)
        },
        "points": [dataclasses.asdict(point) for point in points],
    }


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write the document. Raises OSError."""
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _triple(told: Distribution) -> str:
    if not told.count:
        return "-"
    return "\n".join(f"{value:.1f}" for value in (told.p50, told.p90, told.p99))
