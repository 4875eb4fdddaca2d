"""The split of devices into tiers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan.goodput import (
    DecodeLimit,
    NoSplit,
    Request,
    Slo,
    Split,
    Worker,
    best_split,
    decode_limit,
    drawn_requests,
    ttfts_s,
)
from engine.ranks.mesh import Degrees

REQUESTS = drawn_requests(1000, 100)
SLO = Slo(500.0, 20.0)
ONE = Degrees()


def worker(degrees: Degrees = ONE, prompt_s: float = 0.1, users: int = 1000) -> Worker:
    """Prompts of 1,000 tokens take prompt_s over the devices; steps 10 ms and 0.1 ms a sequence."""
    share = 1 / degrees.num_ranks
    return Worker(
        degrees,
        lambda num_tokens: prompt_s * share * num_tokens / 1000,
        lambda batch, context: (0.01 + 0.0001 * batch) * share,  # noqa: ARG005
        lambda num_tokens: users,  # noqa: ARG005
    )


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 3)), min_size=1, max_size=30),
    st.integers(1, 4),
)
def test_prompts_wait_in_one_line(work: list[tuple[float, float]], num_workers: int) -> None:
    now, requests = 0.0, []
    for gap, _ in work:
        now += gap
        requests.append(Request(now, 1, 1))
    services = [service for _, service in work]
    found = ttfts_s(requests, services, num_workers, 1.0)
    assert all(ttft >= service - 1e-9 for ttft, service in zip(found, services, strict=True))
    ends = [request.arrival_s + ttft for request, ttft in zip(requests, found, strict=True)]
    for request, end, service in zip(requests, ends, services, strict=True):
        begin = end - service
        busy = sum(e - s <= begin < e - 1e-9 for e, s in zip(ends, services, strict=True))
        assert busy <= num_workers, "no more prompts are computed at once than there are workers"
        assert begin >= request.arrival_s - 1e-9


def test_the_decode_limit_is_the_largest_batch_within_the_slo() -> None:
    assert decode_limit(worker(), REQUESTS, SLO) == DecodeLimit(
        100, pytest.approx(20.0), pytest.approx(100 / (100 * 0.02))
    )
    assert decode_limit(worker(users=7), REQUESTS, SLO).batch == 7
    assert decode_limit(worker(), REQUESTS, Slo(500.0, 5.0)) == DecodeLimit(0, 0.0, 0.0)


@settings(max_examples=20)
@given(st.integers(2, 12), st.floats(0.02, 0.4), st.floats(11, 60))
def test_a_split_has_the_devices_and_keeps_both_slos(
    num_devices: int, prompt_s: float, tpot_ms: float
) -> None:
    shapes = [worker(degrees, prompt_s) for degrees in (ONE, Degrees(2))]
    split = best_split(shapes, REQUESTS, Slo(500.0, tpot_ms), num_devices)
    assert isinstance(split, Split)
    tiers = split.prefill, split.decode
    assert sum(t.num_workers * t.degrees.num_ranks for t in tiers) <= num_devices
    assert all(tier.num_workers >= 1 for tier in tiers)
    assert 0 < split.goodput <= min(tier.requests_per_s for tier in tiers)
    assert split.ttft_p90_ms <= 500.0
    assert split.step_ms <= tpot_ms


def test_slower_prompts_take_more_of_the_devices() -> None:
    """One prompt worker does 10/s, one decode worker 50/s."""
    found = []
    for prompt_s in (0.05, 0.2):
        split = best_split([worker(prompt_s=prompt_s)], REQUESTS, SLO, 12)
        assert isinstance(split, Split)
        found.append((split.prefill.num_workers, split.decode.num_workers))
    assert found[0][0] < found[1][0]
    assert found[0][0] + found[0][1] == 12


def test_what_cannot_be_kept_is_said() -> None:
    shapes = [worker()]
    reasons = [
        best_split(shapes, REQUESTS, SLO, 1),
        best_split(shapes, REQUESTS, Slo(500.0, 1.0), 4),
        best_split(shapes, REQUESTS, Slo(50.0, 20.0), 4),
    ]
    assert all(isinstance(reason, NoSplit) for reason in reasons)
    texts = [reason.reason for reason in reasons if isinstance(reason, NoSplit)]
    assert "two devices" in texts[0]
    assert "the fastest step takes 10.1 ms" in texts[1]
    assert "slo_ttft_ms=50" in texts[2]


def test_arrivals_that_are_stretched_wait_less() -> None:
    requests = [Request(float(number), 1, 1) for number in range(10)]
    assert ttfts_s(requests, [2.0] * 10, 1, 2.0) == [2.0] * 10
    assert ttfts_s(requests, [2.0] * 10, 1, 1.0)[-1] == 2.0 + 9.0
