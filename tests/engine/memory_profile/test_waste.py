"""Waste of KV memory by the way it is allocated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory_profile.waste import Contiguous, Waste, allocations, replay_trace
from engine.plan.trace import TraceEntry

Lengths = list[tuple[int, int]]


def replay_all(lengths: Lengths, capacity: int) -> dict[str, Waste]:
    entries = [TraceEntry(0.0, prompt, answer) for prompt, answer in lengths]
    longest = max(prompt + answer for prompt, answer in lengths)
    kinds = allocations(capacity, longest, [4, 16])
    return {name: replay_trace(name, kind, capacity, entries) for name, kind in kinds.items()}


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=30),
    st.integers(128, 600),
)
def test_shares_are_of_the_whole_memory(lengths: Lengths, capacity: int) -> None:
    for waste in replay_all(lengths, capacity).values():
        shares = waste.tokens, waste.reserved, waste.internal, waste.external
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= -1e-9
        assert waste.tokens > 0
        assert waste.num_refused == 0


def test_paging_keeps_more_tokens_in_the_same_memory() -> None:
    found = replay_all([(20 + 7 * (i % 9), 10 + 5 * (i % 7)) for i in range(200)], 2048)
    tokens = [waste.tokens for waste in found.values()]
    longest, power, exact, small, large = tokens
    assert longest < power < exact < large < small
    assert small > 0.9
    assert found["contiguous, exact length"].internal == pytest.approx(0)
    assert found["blocks of 4"].internal < found["blocks of 16"].internal


def test_memory_that_is_never_written_is_not_reserved() -> None:
    waste = replay_all([(4, 2)], 32)["contiguous, power of two"]
    # Of 8 slots: 4, 5 and 6 are written, the rest of 6 is written later, and 2 never.
    assert (waste.tokens, waste.reserved, waste.internal) == (4 / 32, 2 / 32, 2 / 32)


def test_a_request_that_never_fits_is_left_out() -> None:
    found = replay_all([(10, 10), (300, 10), (10, 10)], 100)
    assert {waste.num_refused for waste in found.values()} == {1, 3}


def test_a_request_whose_answer_never_fits_is_left_out() -> None:
    found = replay_all([(10, 10), (60, 50), (10, 10)], 100)
    assert {waste.num_refused for waste in found.values()} == {1, 3}


def test_holes_are_used_where_they_are_large_enough() -> None:
    memory = Contiguous(10, lambda length: length, is_aligned=False)
    assert [memory.begin(key, 1, 3) for key in range(4)] == [True, True, True, False]
    memory.end(1)
    assert not memory.begin(4, 1, 4)
    assert memory.begin(5, 1, 3)
    assert sum(memory.held.values()) == 9
