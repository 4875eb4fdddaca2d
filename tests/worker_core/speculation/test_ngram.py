"""Prompt lookup finds what a search of the whole text finds, however the text came in."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from baton.types import Sampling
from worker_core.speculation.interface import DraftRequest, Proposal
from worker_core.speculation.ngram import (
    MAX_NUM_CANDIDATES,
    Match,
    NgramIndex,
    NgramProposer,
    continuation,
)

texts = st.lists(st.integers(0, 2), max_size=40)


def longest_match(text: Sequence[int], min_tokens: int, max_tokens: int) -> Match | None:
    """The definition, by trying all earlier places, latest first, as many as the index looks at."""
    best: Match | None = None
    ends = [
        end
        for end in range(len(text) - 1, min_tokens - 1, -1)
        if text[end - min_tokens : end] == text[len(text) - min_tokens :]
    ]
    for end in ends[:MAX_NUM_CANDIDATES]:
        length = max(
            n
            for n in range(min_tokens, max_tokens + 1)
            if n <= end and text[end - n : end] == text[len(text) - n :]
        )
        if best is None or length > best.num_tokens:
            best = Match(end, length)
    return best


@given(texts, st.integers(1, 3), st.integers(0, 3), st.lists(st.integers(0, 9), max_size=5))
def test_the_index_finds_the_longest_match(
    text: list[int], min_tokens: int, num_more: int, pieces: list[int]
) -> None:
    index = NgramIndex(min_tokens, min_tokens + num_more)
    num_known = 0
    for piece in [*pieces, len(text)]:
        num_known = min(len(text), num_known + piece)
        index.extend(text[:num_known])
    expected = longest_match(text, min_tokens, min_tokens + num_more)
    assert index.find(text) == expected


@given(texts.filter(bool), st.data(), st.integers(1, 12))
def test_a_continuation_is_what_followed_and_goes_on_with_itself(
    text: list[int], data: st.DataObject, num_tokens: int
) -> None:
    end = data.draw(st.integers(0, len(text) - 1))
    drafts = continuation(text, Match(end, 1), num_tokens)
    whole = [*text, *drafts]
    assert len(drafts) == num_tokens
    assert all(whole[len(text) + i] == whole[end + i] for i in range(num_tokens))


def request_of(key: int, token_ids: Sequence[int], max_num_drafts: int = 4) -> DraftRequest:
    return DraftRequest(key, token_ids, 0, max_num_drafts, Sampling())


@given(st.lists(texts, min_size=1, max_size=3))
def test_sequences_do_not_see_each_other(many: list[list[int]]) -> None:
    together, alone = NgramProposer(2, 4), [NgramProposer(2, 4) for _ in many]
    for length in range(1, 41):
        for key, (text, own) in enumerate(zip(many, alone, strict=True)):
            request = request_of(key, text[:length])
            assert together.estimate([request]) == own.estimate([request])


def test_a_copy_is_drafted_and_a_grade_tells_how_long_the_match_is() -> None:
    proposer = NgramProposer(2, 3)
    text = [1, 2, 3, 4, 5, 9, 2, 3, 4]
    (estimate,) = proposer.estimate([request_of(0, text)])
    assert estimate.drafts == (5, 9, 2, 3)
    assert estimate.confidence == 3
    assert proposer.propose([request_of(0, text, 2)]) == [Proposal((5, 9))]


def test_a_forgotten_sequence_leaves_nothing_behind() -> None:
    proposer = NgramProposer(2, 3)
    proposer.estimate([request_of(0, [1, 2, 1, 2])])
    proposer.forget(0)
    proposer.forget(0)
    (estimate,) = proposer.estimate([request_of(0, [5, 1, 2])])
    assert estimate.num_drafts == 0
