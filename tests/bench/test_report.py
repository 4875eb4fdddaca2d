"""Points as a table, as lines, as JSON and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.machine import write_json
from bench.measure import Record, Slo, summarise
from bench.report import (
    Point,
    data_of,
    goodput_lines,
    plot,
    points_table,
    series,
)

SLO = Slo(ttft_ms=100, tpot_ms=20)


def point(target: str, rate: float, ttft_ms: float, repetition: int = 0) -> Point:
    """One request that was answered with three tokens, 10 ms apart."""
    first = ttft_ms / 1000
    record = Record(
        due_s=0.0,
        sent_s=0.0,
        end_s=first + 0.02,
        num_prompt_tokens=5,
        pieces=tuple((first + step / 100, 1) for step in range(3)),
    )
    return Point(target, rate, repetition, summarise([record], SLO))


POINTS = (
    point("split", 2.0, 50),
    point("colocated", 2.0, 60),
    point("split", 4.0, 90),
    point("colocated", 4.0, 300),
)


def test_the_table_has_a_line_for_each_point_and_none_for_what_was_not_measured() -> None:
    lost = Point("split", 8.0, 0, summarise([Record(0.0, 0.0, 1.0, 5, error="FULL")], SLO))
    lines = points_table(data_of((*POINTS, lost), SLO, 0.9)).splitlines()[2:]
    assert lines[3] == (
        "| colocated | 4 | 1/1 | 9.38 | 0% | 300 / 300 / 300 | 10.0 / 10.0 / 10.0 "
        "| 10.0 / 10.0 / 10.0 |"
    )
    assert lines[4] == "| split | 8 | 0/1 | 0.00 | 0% | - | - | - |"


def test_goodput_says_when_the_answer_lies_outside_what_was_measured() -> None:
    split, colocated = goodput_lines(POINTS, SLO, 0.9)
    assert "split: at least 4 requests/s" in split
    assert "colocated: 2 requests/s" in colocated
    (late,) = goodput_lines([point("split", 2.0, 500)], SLO, 0.9)
    assert "below 2 requests/s" in late
    assert goodput_lines(POINTS, Slo(), 0.9) == []


def test_the_document_holds_all_points_and_is_json(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    write_json(path, data_of(POINTS, SLO, 0.9))
    told = json.loads(path.read_text())
    assert told["slo"] == {"ttft_ms": 100, "tpot_ms": 20, "wanted_attainment": 0.9}
    assert told["goodput_requests_per_s"] == {"split": 4.0, "colocated": 2.0}
    assert [entry["target"] for entry in told["points"]] == [p.target for p in POINTS]
    assert told["points"][3]["summary"]["ttft_ms"]["p50"] == pytest.approx(300)


def test_lines_of_the_plot_are_medians_over_repetitions_by_rate() -> None:
    points = [
        point("split", 4.0, 90),
        *(point("split", 2.0, t, i) for i, t in enumerate((9, 5, 7))),
    ]
    rates, values = series(points, "split", "ttft_ms", "p50")
    assert rates == [2.0, 4.0]
    assert values == pytest.approx([7, 90])
    assert series(points, "colocated", "ttft_ms", "p50") == ([], [])


@pytest.mark.slow
def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "load.png"
    plot(POINTS, SLO, "title", path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
