"""How a step's tokens are divided among the ranks of a context."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types import Sampling
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.ranks.token_shares import ALIGN, TokenShare, divide

#: New tokens and first position of each slice.
SLICES = st.lists(
    st.tuples(st.integers(1, 20) | st.integers(1, 1500), st.integers(0, 900)), max_size=6
)


def batch_of(parts: list[tuple[int, int]]) -> Batch:
    """Slices with rows after their first and last token, twice after the last."""
    return Batch(
        tuple(
            SequenceSlice(
                tuple(range(1000 * index, 1000 * index + length)),
                start,
                (index,),
                tuple(SampleRow(i, Sampling(), (), 0) for i in (0, length - 1, length - 1)),
                num_prompt_tokens=index,
            )
            for index, (length, start) in enumerate(parts)
        )
    )


def attention_work(share: TokenShare) -> int:
    """Keys that the share's queries attend to."""
    return sum(
        sum(range(part.start + 1, part.start + len(part.token_ids) + 1))
        for part in share.batch.slices
    )


@given(SLICES, st.integers(1, 4))
def test_each_token_and_each_row_has_one_rank(parts: list[tuple[int, int]], size: int) -> None:
    batch = batch_of(parts)
    shares = divide(batch, size)
    if not shares:
        return
    assert len(shares) == size > 1
    tokens, rows = [], []
    begins = list(accumulate((len(part.rows) for part in batch.slices), initial=0))
    for share in shares:
        numbers = iter(share.rows)
        for index, part in zip(share.indices, share.batch.slices, strict=True):
            whole = batch.slices[index]
            first = part.start - whole.start
            assert part.token_ids == whole.token_ids[first : first + len(part.token_ids)]
            assert part.block_table is whole.block_table
            assert part.num_prompt_tokens == whole.num_prompt_tokens
            tokens += [(index, part.start + i) for i in range(len(part.token_ids))]
            for row in part.rows:
                number = next(numbers)
                assert row.offset + first == whole.rows[number - begins[index]].offset
                rows.append(number)
    wanted = [
        (index, part.start + i)
        for index, part in enumerate(batch.slices)
        for i in range(len(part.token_ids))
    ]
    assert sorted(tokens) == wanted
    assert sorted(rows) == list(range(begins[-1]))


@given(SLICES, st.integers(2, 4))
def test_ranks_have_about_as_many_tokens(parts: list[tuple[int, int]], size: int) -> None:
    lengths = [len(part.token_ids) for part in batch_of(parts).slices]
    uncut = [length for length in lengths if length < 2 * size * ALIGN]
    tokens = [share.batch.num_tokens for share in divide(batch_of(parts), size)]
    if tokens:
        ragged = 2 * ALIGN * (len(lengths) - len(uncut))
        assert max(tokens) - min(tokens) <= max(uncut, default=0) + ragged


@pytest.mark.parametrize("start", [0, 4096])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_long_prompt_gives_each_rank_equal_attention_work(start: int, size: int) -> None:
    work = [attention_work(share) for share in divide(batch_of([(4096, start)]), size)]
    assert max(work) < 1.02 * min(work)


@pytest.mark.parametrize("parts", [[(1, 500)], [(40, 0)], [(63, 0)], [(1, 9)] * 63])
def test_a_short_step_is_not_divided(parts: list[tuple[int, int]]) -> None:
    assert divide(batch_of(parts), 2) == ()
    assert divide(batch_of([(4096, 0)]), 1) == ()


def test_a_prompt_that_cannot_be_cut_leaves_no_rank_without_tokens() -> None:
    """Three ranks cut from 96 tokens on."""
    assert divide(batch_of([(95, 0), (1, 3)]), 3) == ()
    assert len(divide(batch_of([(96, 0)]), 3)) == 3
