"""What `python -m bench.sharing` shows of its runs."""

from __future__ import annotations

import dataclasses

import pytest
import typer

from bench.measure import Record, Slo, summarise
from bench.report import Point
from bench.sharing import cells_of, load_of, row_of

SLO = Slo(ttft_ms=400.0, tpot_ms=20.0)


def points_of(target: str, gaps_ms: list[float], num_late: int = 0) -> list[Point]:
    """A run of two requests for each of the gaps; of all runs, so many come late."""
    points = []
    for repetition, gap_ms in enumerate(gaps_ms):
        record = Record(0.0, 0.0, 1.0, 8, ((0.1, 1), (0.1 + gap_ms / 1e3, 1)))
        late = dataclasses.replace(record, pieces=((0.5, 1), (0.5 + gap_ms / 1e3, 1)))
        records = [late if 2 * repetition + i < num_late else record for i in range(2)]
        points.append(Point(target, 4.0, repetition, summarise(records, SLO)))
    return points


def test_a_cell_is_of_all_runs_of_its_rate() -> None:
    other_rate = dataclasses.replace(points_of("split", [90.0], num_late=2)[0], rate=8.0)
    cells = cells_of([*points_of("split", [5.0, 7.0, 19.0], num_late=1), other_rate], 4.0)
    assert cells["split"].share == pytest.approx(5 / 6)
    assert cells["split"].itl_ms == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("num_late", "itl_ms", "goals"),
    [
        (1, 12.0, "met"),
        (2, 12.0, "**share missed**"),
        (1, 12.1, "**gaps (1.21 times) missed**"),
        (2, 15.0, "**share, gaps (1.50 times) missed**"),
    ],
)
def test_what_misses_a_goal_is_named(num_late: int, itl_ms: float, goals: str) -> None:
    points = [
        *points_of("split", [itl_ms] * 2, num_late),
        *points_of("apart", [10.0] * 2, num_late=4),
        *points_of("colocated", [19.0] * 2, num_late=1),
    ]
    row = row_of("azure", 4.0, cells_of(points, 4.0))
    assert row[0:2] == ["azure", "4"]
    assert row[3:] == ["0.0%, 10.0 ms", "75.0%, 19.0 ms", goals]


def test_a_load_has_a_scale_of_its_own() -> None:
    assert load_of("a/b.csv").name == "b"
    assert load_of("a/b.csv:0.06").name == "b, prompts * 0.06"
    for wrong in ("b.csv:x", "b.csv:0"):
        with pytest.raises(typer.BadParameter, match=r"b\.csv"):
            load_of(wrong)
