"""Sums that fade by work: they agree with the plain formula, sum to the mean, and forgive."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.history import RecentWork

MEMORY = 1000
NAMES = ("a", "b", "c")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("give"), st.sampled_from(NAMES), st.integers(0, 500)),
        st.tuples(st.sampled_from(("add", "drop")), st.sampled_from(NAMES), st.just(0)),
    ),
    max_size=40,
)


@given(gifts=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 500)), max_size=30))
def test_a_sum_is_what_was_given_each_faded_by_what_came_after(
    gifts: list[tuple[str, int]],
) -> None:
    work = RecentWork(MEMORY)
    for name in NAMES:
        work.add(name)
    sums = dict.fromkeys(NAMES, 0.0)
    for name, num_tokens in gifts:
        work.give(name, num_tokens)
        fade = math.exp(-num_tokens / len(NAMES) / MEMORY)
        sums = {each: value * fade for each, value in sums.items()}
        sums[name] += num_tokens
    mean = sum(sums.values()) / len(NAMES)
    for name in NAMES:
        assert work.ahead(name) == pytest.approx(sums[name] - mean, abs=1e-6)


@given(steps=STEPS)
def test_leads_cancel_out_whoever_comes_and_goes(steps: list[tuple[str, str, int]]) -> None:
    work = RecentWork(MEMORY)
    members: set[str] = set()
    for kind, name, num_tokens in steps:
        if kind == "give":
            work.give(name, num_tokens)
        elif kind == "add":
            is_new = name not in members
            members.add(name)
            work.add(name)
            assert not is_new or work.ahead(name) == pytest.approx(0, abs=1e-6)
        else:
            members.discard(name)
            work.drop(name)
        assert sum(map(work.ahead, NAMES)) == pytest.approx(0, abs=1e-6)
        assert all(work.ahead(each) == 0 for each in set(NAMES) - members)


def test_a_lead_is_forgotten_in_time() -> None:
    work = RecentWork(MEMORY)
    for name in NAMES:
        work.add(name)
    work.give("a", 900)
    assert work.ahead("a") == pytest.approx(600)
    for _ in range(100):
        for name in NAMES:
            work.give(name, 100)
    assert abs(work.ahead("a")) <= 100
