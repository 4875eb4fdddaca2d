"""Counts of a growing sequence's tokens."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.token_counts import TokenCounts

TOKENS = st.lists(st.integers(0, 5), max_size=12)


def found(counts: TokenCounts) -> dict[int, int]:
    tokens = counts.tokens.tolist()
    assert len(set(tokens)) == len(tokens)
    return dict(zip(tokens, map(int, counts.outputs), strict=True))


def wanted(token_ids: list[int], num_prompt_tokens: int) -> dict[int, int]:
    outputs = Counter(token_ids[num_prompt_tokens:])
    return {token: outputs[token] for token in token_ids}


@given(st.lists(TOKENS, min_size=1, max_size=6), TOKENS, st.integers(0, 20))
def test_counts_follow_a_sequence_and_forget_its_drafts(
    parts: list[list[int]], drafts: list[int], num_prompt_tokens: int
) -> None:
    counts, token_ids = TokenCounts(num_prompt_tokens), list[int]()
    for part in parts:
        token_ids += part
        assert found(counts.follow(token_ids)) == wanted(token_ids, num_prompt_tokens)
        with counts.beyond([*token_ids, *drafts]) as beyond:
            assert found(beyond) == wanted([*token_ids, *drafts], num_prompt_tokens)
        assert found(counts) == wanted(token_ids, num_prompt_tokens)
        assert counts.num_tokens == len(token_ids)


def test_counts_grow_beyond_their_first_room() -> None:
    token_ids = [*range(1000), *range(500, 1500)]
    counts = TokenCounts.of(token_ids, 1000)
    assert found(counts) == wanted(token_ids, 1000)
