"""An attention backend that reads chosen blocks where a sequence has one new token.

The kernels take a block table, and a token's position is its place in it plus a rotation that is in
the keys already. So a table without some blocks, with a start that is less by their tokens, is
attention over the rest. Prompts, drafts under verification and windowed layers read everything. One
choice is for all heads of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from baton_kernels.attention_backends import AttentionBackend
from baton_kernels.paged_attention import (
    NO_TERMS,
    AttentionSlice,
    PlacedTables,
    ScoreTerms,
    paged_attention,
    plan_attention,
)
from engine.sparse.summaries import KEPT_ROWS, KeySummaries


class BlockChoice(Protocol):
    """A kind of choice, for a number of blocks at most."""

    @property
    def most(self) -> int:
        """Blocks kept; shorter sequences are read whole."""
        ...

    @property
    def reads_keys(self) -> bool:
        """Whether choices depend on query and keys, hence differ by layer; else on lengths
        alone."""
        ...

    def choose(
        self, num_blocks: int, query: torch.Tensor | None, bounds: torch.Tensor | None
    ) -> Sequence[int]:
        """Indices of the `most` blocks to read of num_blocks, which are more; ascending, with the
        last. query [heads, head_dim], bounds [kv_heads, num_blocks - 1, 2, head_dim]: minima and
        maxima of the keys of all blocks but the last; None unless reads_keys."""
        ...


@dataclass(frozen=True, slots=True)
class _LayerPlan:
    """What `attend` plans for each layer. whole: blocks [n] of each slice that the choice is
    among, which are all but the last; None for a slice that is read whole."""

    slices: tuple[AttentionSlice, ...]
    whole: tuple[torch.Tensor | None, ...]
    num_heads: int
    scale: float
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class _SparseAttention:
    choice: BlockChoice
    summaries: KeySummaries

    def plan(
        self,
        slices: Sequence[AttentionSlice],
        pool: torch.Tensor,
        num_heads: int,
        scale: float,
        window: int | None,
        dtype: torch.dtype | None = None,
        placed: PlacedTables | None = None,
    ) -> Any:
        """See paged_attention.plan_attention."""
        block_size = pool.shape[4]
        if window is not None or not any(self._is_sparse(part, block_size) for part in slices):
            return plan_attention(slices, pool, num_heads, scale, window, dtype, placed)
        if not self.choice.reads_keys:
            some = [self._shortened(part, block_size) for part in slices]
            return plan_attention(some, pool, num_heads, scale, None, dtype)
        whole: list[torch.Tensor | None] = []
        for part in slices:
            blocks = None
            if self._is_sparse(part, block_size):
                blocks = torch.tensor(_table(part, block_size)[:-1], device=pool.device)
                self.summaries.refresh(pool, blocks)
            whole.append(blocks)
        return _LayerPlan(tuple(slices), tuple(whole), num_heads, scale, dtype)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: Any,
        scales: torch.Tensor | None = None,
        terms: ScoreTerms = NO_TERMS,
    ) -> torch.Tensor:
        """See paged_attention.paged_attention."""
        if isinstance(plan, _LayerPlan):
            size = pool.shape[4]
            some = [
                part
                if blocks is None
                else self._shortened(
                    part, size, query[part.first_row], self.summaries.of(layer, blocks)
                )
                for part, blocks in zip(plan.slices, plan.whole, strict=True)
            ]
            plan = plan_attention(some, pool, plan.num_heads, plan.scale, None, plan.dtype)
        return paged_attention(query, key, value, pool, layer, plan, scales, terms)

    def _is_sparse(self, part: AttentionSlice, block_size: int) -> bool:
        return part.num_tokens == 1 and part.start // block_size + 1 > self.choice.most

    def _shortened(
        self,
        part: AttentionSlice,
        block_size: int,
        query: torch.Tensor | None = None,
        bounds: torch.Tensor | None = None,
    ) -> AttentionSlice:
        """The slice with chosen blocks alone. query, bounds: see BlockChoice."""
        if not self._is_sparse(part, block_size):
            return part
        table = _table(part, block_size)
        kept = self.choice.choose(len(table), query, bounds)
        start = part.start - (len(table) - len(kept)) * block_size
        return part._replace(start=start, block_table=[table[index] for index in kept])


def _table(part: AttentionSlice, block_size: int) -> list[int]:
    """Blocks of the slice's tokens."""
    return list(part.block_table)[: part.start // block_size + 1]


def sparse_backend(name: str, choice: BlockChoice) -> AttentionBackend:
    """The backend of a choice. name: with all that results depend on; part of the numerics
    class."""
    sparse = _SparseAttention(choice, KeySummaries())
    if not choice.reads_keys:
        return AttentionBackend(name, name, sparse.plan, paged_attention)
    return AttentionBackend(name, name, sparse.plan, sparse.attend, KEPT_ROWS)
