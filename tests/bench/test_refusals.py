"""What `python -m bench.refusals` counts and shows of its loads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.measure import Record, Slo
from bench.refusals import Plan, markdown, result_of

PLAN = Plan((10.0,), 20.0, 4.0, Slo(600.0, 60.0))
ANSWERED = Record(0.0, 0.0, 1.0, 8, ((0.5, 1), (0.55, 1)))


def at(record: Record, due_s: float, took_s: float) -> Record:
    pieces = tuple((due_s + time_s, count) for time_s, count in record.pieces)
    return replace(record, due_s=due_s, sent_s=due_s, end_s=due_s + took_s, pieces=pieces)


@pytest.mark.parametrize(("refusal_s", "verdict"), [(0.04, "(met)"), (0.06, "(**missed**)")])
def test_answers_inside_both_targets_are_counted_apart_from_those_in_time(
    refusal_s: float, verdict: str
) -> None:
    refused = replace(ANSWERED, pieces=(), error="OVERLOADED")
    records = [
        at(ANSWERED, 4.0, 1.0),
        at(replace(ANSWERED, pieces=((0.7, 1), (0.75, 1))), 5.0, 1.0),  # first token late
        at(replace(ANSWERED, pieces=((0.5, 1), (0.57, 1))), 6.0, 1.0),  # gap too long
        at(refused, 7.0, refusal_s),
        at(ANSWERED, 10.0, 1.0),  # after the load
    ]
    result = result_of("HTTP", PLAN, 10.0, 50.0, records)
    assert result.level.goodput == pytest.approx(3 / 6)
    assert result.inside == pytest.approx(1 / 6)
    assert result.level.num_refused == 1
    shown = markdown("Here.", PLAN, 5.0, [result], "16 places")
    assert f"HTTP at 10 times {1e3 * refusal_s:.1f} {verdict}" in shown
    assert "| HTTP | 10 | 50.0 | 5 |" in shown
    used = replace(result, cores=(0.5, 0.25, 1.0))
    assert "| 0.50 / 0.25 / 1.00 |" in markdown("Here.", PLAN, 5.0, [used], "16 places")
