"""Percentiles, latencies of a record, attainment and goodput."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measure import Record, Slo, distribution, goodput, percentile, summarise

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)
SHARES = st.floats(0, 1)
RECORD = Record(due_s=1.0, sent_s=1.01, end_s=2.0, num_prompt_tokens=7)


@st.composite
def records(draw: st.DrawFn) -> Record:
    due_ms, lag_ms = draw(st.integers(0, 5000)), draw(st.integers(0, 50))
    gaps_ms = draw(st.lists(st.integers(0, 900), max_size=8))
    time_ms, pieces = due_ms + lag_ms, []
    for gap_ms in gaps_ms:
        time_ms += gap_ms
        pieces.append((time_ms / 1000, draw(st.integers(1, 4))))
    return Record(
        due_s=due_ms / 1000,
        sent_s=(due_ms + lag_ms) / 1000,
        end_s=time_ms / 1000,
        num_prompt_tokens=draw(st.integers(1, 100)),
        pieces=tuple(pieces),
        error=draw(st.sampled_from(["", "", "", "OVERLOADED"])),
    )


@given(VALUES, SHARES, SHARES)
def test_percentiles_ascend_within_the_values(
    values: list[float], one: float, other: float
) -> None:
    ordered = sorted(values)
    low, high = sorted((one, other))
    assert ordered[0] <= percentile(ordered, low) <= percentile(ordered, high) <= ordered[-1]
    assert percentile(ordered, 0) == ordered[0]
    assert percentile(ordered, 1) == ordered[-1]


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=60))
def test_the_middle_is_the_median(values: list[int]) -> None:
    told = distribution(values)
    assert told.p50 == pytest.approx(statistics.median(values))
    assert told.mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert (told.count, told.max) == (len(values), max(values))


def test_no_values_have_no_percentile() -> None:
    assert distribution([]).count == 0
    with pytest.raises(ValueError, match="percentile"):
        percentile([], 0.5)


def test_latencies_count_from_when_a_request_was_due() -> None:
    record = replace(RECORD, pieces=((1.25, 1), (1.35, 2), (1.75, 2)))
    assert record.ttft_ms == pytest.approx(250)
    assert record.itl_ms == pytest.approx((100, 400))
    assert record.tpot_ms == pytest.approx(500 / 4)
    assert record.num_output_tokens == 5


def test_an_answer_of_one_piece_has_no_time_per_later_token() -> None:
    assert replace(RECORD, pieces=((1.5, 3),)).tpot_ms is None
    assert RECORD.ttft_ms is None
    assert not RECORD.is_complete


@given(st.lists(records(), min_size=1, max_size=20), SHARES)
def test_a_summary_counts_every_request_once(made: list[Record], share: float) -> None:
    slo = Slo(ttft_ms=1000 * share, tpot_ms=300)
    told = summarise(made, slo)
    assert told.num_requests == len(made) == told.num_complete + sum(told.errors.values())
    assert told.ttft_ms.count == told.num_complete
    assert told.slo_attainment * len(made) == pytest.approx(sum(map(slo.is_met_by, made)))
    assert told.num_output_tokens == sum(r.num_output_tokens for r in made if r.is_complete)
    assert told.requests_per_s * told.duration_s == pytest.approx(
        told.num_complete if told.duration_s else 0
    )
    strict = summarise(made, Slo(ttft_ms=500 * share, tpot_ms=100))
    assert strict.slo_attainment <= told.slo_attainment
    assert summarise(made, Slo()).slo_attainment == pytest.approx(told.num_complete / len(made))


def test_a_failed_request_is_outside_every_slo() -> None:
    failed = replace(RECORD, pieces=((1.01, 1),), error="WORKER_LOST")
    assert not Slo().is_met_by(failed)
    assert summarise([failed], Slo()).errors == {"WORKER_LOST": 1}


POINTS = st.lists(
    st.tuples(st.sampled_from([1.0, 2.0, 4.0, 8.0]), st.sampled_from([0.0, 0.5, 0.85, 0.95, 1.0])),
    min_size=1,
    max_size=10,
)


@given(POINTS)
def test_goodput_is_the_last_rate_before_the_first_failing_one(
    points: list[tuple[float, float]],
) -> None:
    best = goodput(points, 0.9)
    mean = {
        rate: statistics.fmean(share for other, share in points if other == rate)
        for rate in {rate for rate, _ in points}
    }
    failing = [rate for rate, share in mean.items() if share < 0.9]
    passing = [rate for rate in mean if not failing or rate < min(failing)]
    assert best == (max(passing) if passing else None)
    assert best == goodput(points[::-1], 0.9)
