"""Token ids: they honour lengths and hash_ids, and nothing else matters to them."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from bench.workload import prompt_of, requests_of, synthetic_entries
from engine.plan.trace import TraceEntry

VOCAB = 50_000
NAMES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
BLOCKS = st.integers(1, 20)
SEEDS = st.integers(0, 1000)


def shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Leading elements that are equal."""
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


@given(NAMES, NAMES, BLOCKS, st.integers(1, 90), st.integers(1, 90), SEEDS)
def test_prompts_share_as_far_as_their_hash_ids_agree(
    left: tuple[int, ...], right: tuple[int, ...], block: int, one: int, other: int, seed: int
) -> None:
    prompts = [
        prompt_of(TraceEntry(0.0, length, 1, names, block), index, VOCAB, seed)
        for index, (names, length) in enumerate(((left, one), (right, other)))
    ]
    assert [len(prompt) for prompt in prompts] == [one, other]
    agreed = min(shared(left, right) * block, one, other)
    found = shared(prompts[0], prompts[1])
    assert found >= agreed
    # Beyond it tokens are drawn apart: that two equal ones follow is chance, that many do is not.
    assert found <= agreed + 2


@given(st.integers(1, 60), st.integers(2, 300), SEEDS, st.integers(0, 9))
def test_tokens_are_of_the_vocabulary_and_the_same_each_time(
    length: int, vocab_size: int, seed: int, index: int
) -> None:
    entry = TraceEntry(0.0, length, 1, (3,), 8)
    prompt = prompt_of(entry, index, vocab_size, seed)
    assert prompt == prompt_of(entry, index, vocab_size, seed)
    assert all(0 <= token < vocab_size for token in prompt)


@given(st.integers(1, 50), st.integers(1, 100), st.integers(1, 50), st.floats(0, 1), SEEDS)
def test_drawn_lengths_lie_within_their_spread(
    count: int, num_input: int, num_output: int, spread: float, seed: int
) -> None:
    entries = synthetic_entries(count, num_input, num_output, spread, Random(seed))
    assert len(entries) == count
    for entry in entries:
        for length, mean in (
            (entry.num_input_tokens, num_input),
            (entry.num_output_tokens, num_output),
        ):
            assert length >= 1
            assert abs(length - mean) <= mean * spread + 0.5 or length == 1


def test_requests_take_their_times_in_order() -> None:
    entries = synthetic_entries(3, 4, 5, 0.0, Random(0))
    requests = requests_of(entries, (0.0, 1.5, 2.0), VOCAB, 0)
    assert [request.due_s for request in requests] == [0.0, 1.5, 2.0]
    assert {request.num_output_tokens for request in requests} == {5}
    assert len({request.prompt_token_ids for request in requests}) == 3
