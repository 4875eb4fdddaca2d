"""Native paged attention: right to rounding, reads nothing that it must not, and a row depends on
itself alone."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton_kernels.cpu.paged_attention import AttentionPlan
from baton_kernels.paged_attention import (
    NO_TERMS,
    AttentionSlice,
    ScoreTerms,
    paged_attention,
    plan_attention,
)
from tests.support.pairwise import pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LAYER, SCALE = 1, 0.3

Sequences = list[tuple[int, int]]
"""(start, number of new tokens) of each."""


class Case:
    """Random KV for some sequences in shuffled blocks, everything else NaN."""

    def __init__(
        self,
        sequences: Sequences,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        window: int | None,
        num_parts: int = 2,
    ) -> None:
        """num_parts: 1 for rows that are keys and values."""
        generator = torch.Generator().manual_seed(len(sequences))
        counts = [-(-(start + n) // block_size) for start, n in sequences]
        blocks = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        firsts = accumulate((n for _, n in sequences), initial=0)
        ends = accumulate(counts, initial=0)
        self.slices = [
            AttentionSlice(first, n, start, blocks[end : end + count])
            for first, end, count, (start, n) in zip(firsts, ends, counts, sequences, strict=False)
        ]
        shape = (len(blocks), 2, num_parts, kv_heads, block_size, head_dim)
        self.pool = torch.full(shape, float("nan"), dtype=dtype)
        self.heads, self.window = heads, window
        num_rows = sum(n for _, n in sequences)
        self.query = torch.randn(num_rows, heads, head_dim, generator=generator).to(dtype)
        self.kv = [self._fill(part, generator) for part in self.slices]

    def _fill(self, part: AttentionSlice, generator: torch.Generator) -> torch.Tensor:
        """Keys and values [2, tokens, kv_heads, head_dim]; those before every window are not in the
        pool."""
        _, _, num_parts, kv_heads, size, dim = self.pool.shape
        length = part.start + part.num_tokens
        kv = torch.randn(num_parts, length, kv_heads, dim, generator=generator)
        kv = kv.to(self.pool.dtype).expand(2, -1, -1, -1)
        oldest = 0 if self.window is None else max(0, part.start - self.window + 1)
        for p in range(oldest, length):
            self.pool[part.block_table[p // size], LAYER, :, :, p % size] = kv[:num_parts, p]
        return kv

    def run(self, parts: list[AttentionSlice], terms: ScoreTerms = NO_TERMS) -> torch.Tensor:
        query, key, value, pool, layer, plan = self.arguments(parts)
        assert isinstance(plan, AttentionPlan)
        return paged_attention(query, key, value, pool, layer, plan, None, terms)

    def arguments(
        self, parts: list[AttentionSlice], *, is_twin: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, Any]:
        """Arguments of paged_attention. The twin may read new keys and values from where they come
        from."""
        plan = plan_attention.twin if is_twin else plan_attention
        planned = plan(parts, self.pool, self.heads, SCALE, self.window)
        keys, values = (self._new(kind) if is_twin else self.query[:, :1] for kind in (0, 1))
        return self.query, keys, values, self.pool, LAYER, planned

    def _new(self, kind: int) -> torch.Tensor:
        """Keys or values of new tokens [tokens, kv_heads, head_dim]."""
        return torch.cat(
            [kv[kind, part.start :] for part, kv in zip(self.slices, self.kv, strict=True)]
        )

    def expected(self, terms: ScoreTerms = NO_TERMS) -> torch.Tensor:
        rows = []
        for part, kv in zip(self.slices, self.kv, strict=True):
            keys, values = kv.double().repeat_interleave(self.heads // kv.shape[2], 2)
            for i in range(part.num_tokens):
                end = part.start + i + 1
                first = 0 if self.window is None else max(0, end - self.window)
                query = self.query[part.first_row + i].double()
                scores = torch.einsum("hd,khd->hk", query, keys[first:end]) * SCALE
                if terms.softcap is not None:
                    scores = terms.softcap * torch.tanh(scores / terms.softcap)
                if terms.slopes is not None:
                    distances = torch.arange(first - end + 1, 1)
                    scores += terms.slopes[:, None].double() * distances
                if terms.sinks is not None:
                    scores = torch.cat((scores, terms.sinks[:, None].double()), 1)
                weights = scores.softmax(-1)[:, : end - first]
                rows.append(torch.einsum("hk,khd->hd", weights, values[first:end]))
        return torch.stack(rows)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@example([(63, 17)], (1, 1), 16, 1, torch.bfloat16, None, 2)
@example([(130, 3)], (4, 2), 100, 16, torch.bfloat16, 64, 2)
@example([(10, 40), (200, 30)], (4, 1), 128, 16, torch.bfloat16, None, 2)
@example([(90, 13)], (4, 1), 256, 3, torch.float32, 50, 2)
@example([(90, 13), (70, 1)], (16, 1), 576, 16, torch.float32, None, 1)
@example([(90, 13), (70, 1)], (16, 1), 576, 16, torch.bfloat16, None, 1)
@given(
    sequences=st.lists(
        st.tuples(st.sampled_from([0, 1, 15, 63, 64, 130]), st.sampled_from([1, 2, 5, 17])),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (5, 1), (4, 4)]),
    head_dim=st.sampled_from([2, 16, 18, 24, 32, 64, 100]),
    block_size=st.sampled_from([1, 3, 16, 64]),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([None, 1, 7, 64, 100]),
    num_parts=st.sampled_from([1, 2]),
)
def test_against_float64(
    sequences: Sequences,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    num_parts: int,
) -> None:
    case = Case(sequences, *heads, head_dim, block_size, dtype, window, num_parts)
    got = case.run(case.slices)
    torch.testing.assert_close(got.double(), case.expected(), atol=TOLERANCE[dtype], rtol=1e-2)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("block_size", [5, 16])
def test_a_token_is_the_same_to_the_bit_in_every_chunk_and_batch(
    dtype: torch.dtype, window: int | None, block_size: int
) -> None:
    case = Case([(0, 150), (40, 3), (199, 1)], 6, 2, 40, block_size, dtype, window)
    together = case.run(case.slices)
    for part in case.slices:
        for i in range(0, part.num_tokens, 7):
            row = part.first_row + i
            alone = AttentionSlice(row, 1, part.start + i, part.block_table)
            assert torch.equal(case.run([alone])[row], together[row])


@pytest.mark.parametrize("kind", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_broken_breaks_its_sequence_alone(dtype: torch.dtype, kind: int) -> None:
    case = Case([(20, 1), (20, 1)], 2, 1, 16, 4, dtype, None)
    case.pool[case.slices[0].block_table[1], LAYER, kind, 0, 2, 3] = float("nan")
    got = case.run(case.slices)
    assert not torch.isfinite(got[0]).all(-1).any()
    assert torch.isfinite(got[1]).all()


TERMS = {
    "softcap": ScoreTerms(softcap=2.0),
    "sinks": ScoreTerms(sinks=torch.tensor([3.0, -2.0, 0.5, 40.0])),
    "slopes": ScoreTerms(slopes=torch.tensor([0.5, 0.25, 0.125, 1.0])),
    "two": ScoreTerms(2.0, torch.tensor([1.0, -1.0, 0.0, 2.0])),
}


@pairwise(terms=list(TERMS), window=[None, 37], dtype=DTYPES)
def test_terms_of_scores(terms: str, window: int | None, dtype: torch.dtype) -> None:
    """By few rows and by many, which agree to the bit, and by the twin; against float64."""
    case = Case([(0, 70), (40, 3), (99, 1)], 4, 2, 40, 16, dtype, window)
    own = TERMS[terms]
    together = case.run(case.slices, own)
    torch.testing.assert_close(
        together.double(), case.expected(own), atol=TOLERANCE[dtype], rtol=1e-2
    )
    # The twin multiplies what is masked, too.
    case.pool = case.pool.nan_to_num()
    twin = paged_attention.twin(*case.arguments(case.slices, is_twin=True), None, own)
    torch.testing.assert_close(twin, together, atol=2 * TOLERANCE[dtype], rtol=1e-2)
    for part in case.slices:
        for i in range(0, part.num_tokens, 7):
            row = part.first_row + i
            alone = AttentionSlice(row, 1, part.start + i, part.block_table)
            assert torch.equal(case.run([alone], own)[row], together[row])
