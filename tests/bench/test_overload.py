"""What `python -m bench.overload` shows of its runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench.measure import Record
from bench.overload import Advice, Beside, Level, level_of, markdown

ANSWERED = Record(0.0, 0.0, 1.0, 8, ((0.5, 1), (1.0, 1)))


def at(record: Record, due_s: float, took_s: float) -> Record:
    return dataclasses.replace(record, due_s=due_s, sent_s=due_s, end_s=due_s + took_s)


def test_goodput_is_of_answers_that_end_behind_the_first_deadline_and_within_the_load() -> None:
    refused = dataclasses.replace(ANSWERED, pieces=(), error="OVERLOADED")
    late = dataclasses.replace(ANSWERED, error="DEADLINE_EXCEEDED")
    records = [
        at(ANSWERED, 0.0, 3.0),  # while the queue fills
        at(ANSWERED, 1.0, 4.0),
        at(ANSWERED, 2.0, 4.0),
        at(refused, 3.0, 0.010),
        at(refused, 4.0, 0.030),
        at(late, 5.0, 4.0),
        at(ANSWERED, 9.0, 3.0),  # after the load
    ]
    level = level_of(2.0, 5.0, 4.0, records)
    assert level.goodput == pytest.approx(2 / 5)
    assert (level.num_answered, level.num_refused) == (4, 2)
    assert level.refusal_p50_ms == pytest.approx(20.0)
    assert level.refusal_max_ms == pytest.approx(30.0)
    assert level.late == {"DEADLINE_EXCEEDED": 1}


def document_of(kept: float, refusal_ms: float, advice_s: float) -> dict[str, Any]:
    levels = [
        Level(1.0, 8.0, 240, 8.0, 240, 0, 0.0, 0.0, 0.0, 1.0, {}),
        Level(10.0, 80.0, 2400, 8 * kept, 300, 2100, 5.0, refusal_ms, 90.0, 1.0, {}),
    ]
    return {
        "command": ["python"],
        "started": "2026-11-24T01:00:00+00:00",
        "machine": {"cpu": "x", "num_cores": 2, "load_average": [1.0]},
        "versions": {},
        "capacity": 8.0,
        "timeout_s": 10.0,
        "num_places": 16,
        "levels": [dataclasses.asdict(level) for level in levels],
        "advice": [dataclasses.asdict(Advice(4.0, advice_s, 2.0))],
        "fairness": [dataclasses.asdict(Beside("nobody", 5.0, 6.0))],
    }


@pytest.mark.parametrize(
    ("kept", "refusal_ms", "advice_s", "num_missed"),
    [(0.9, 50.0, 4.0, 0), (0.89, 50.0, 1.0, 1), (0.9, 50.1, 2.0, 1), (0.9, 9.0, 4.1, 1)],
)
def test_what_misses_a_goal_is_named(
    kept: float, refusal_ms: float, advice_s: float, num_missed: int
) -> None:
    shown = markdown(document_of(kept, refusal_ms, advice_s))
    assert shown.count("**missed**") == num_missed
    assert f"| {kept:.0%} |" in shown
