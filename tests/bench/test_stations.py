"""Gaps are found per sequence at each station, and only between a token and the next one of the
same sequence."""

from __future__ import annotations

import pytest

from bench.measure import Record
from bench.stations import stations_of
from bench.timed_worker import StepTimes

#: Two sequences in blocks 7 and 9; that of 9 ends after a token, and another one gets its block.
STEPS: tuple[StepTimes, ...] = (
    (0.000, 0.006, 2, ((7, 10), (9, 40))),
    (0.007, 0.014, 2, ((7, 11), (9, 41))),
    (0.014, 0.020, 1, ((7, 12),)),
    (0.500, 0.506, 70, ((9, 5),)),
)


def test_each_station_tells_its_own_gaps() -> None:
    record = Record(0.0, 0.0, 0.1, 64, pieces=((0.010, 1), (0.040, 1), (0.047, 1)))
    told = stations_of(STEPS, [0.1, 0.3], [record], step_ms=5.0, token_us=100.0)
    assert told.worker.count == 3
    assert told.worker.max == pytest.approx(8.0)
    assert told.engine.max == pytest.approx(7.0)
    assert told.asked.count == 6
    assert told.asked.p50 == pytest.approx(5.2)
    assert told.asked.max == pytest.approx(12.0)
    assert told.client.count == 2
    assert told.first.p50 == pytest.approx(30.0)
    assert told.late.max == pytest.approx(0.3)
