"""Blocks by summaries of their keys (Tang et al. 2024, Quest): the blocks with the highest upper
bounds of a score.

    bound[b] = sum_d max(query[d] * min_b[d], query[d] * max_b[d])

with the minimum and maximum of block b's keys by element. A head's bounds are relative to its
highest, and a block's bound is that of its best head. Summaries are computed from the keys in each
step, so this kind saves no reads yet: it shows what the choice costs in quality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Pages:
    """See engine.sparse.backend.BlockChoice."""

    most: int
    reads_keys: bool = True

    def choose(
        self, num_blocks: int, query: torch.Tensor | None, keys: torch.Tensor | None
    ) -> Sequence[int]:
        """See BlockChoice."""
        if query is None or keys is None:
            raise ValueError("a choice by pages needs the query and the keys")
        # The last block is always read, and may hold rows that nobody wrote.
        whole = keys[:-1].float()
        low, high = whole.amin(2), whole.amax(2)
        heads = query.float().view(keys.shape[1], -1, keys.shape[3])
        positive, negative = heads.clamp(min=0), heads.clamp(max=0)
        bounds = torch.einsum("ghd,bgd->bgh", positive, high)
        bounds += torch.einsum("ghd,bgd->bgh", negative, low)
        relative = (bounds - bounds.amax(0)).flatten(1).amax(1)
        kept = relative.topk(self.most - 1).indices.sort().values.tolist()
        return [*kept, num_blocks - 1]
