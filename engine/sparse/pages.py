"""Blocks by summaries of their keys (Tang et al. 2024, Quest): the blocks with the highest upper
bounds of a score.

    bound[b] = sum_d max(query[d] * min_b[d], query[d] * max_b[d])

with the minimum and maximum of block b's keys by element. A head's bounds are relative to its
highest, and a block's bound is that of its best head. A step reads two rows of each block and the
keys and values of those chosen.
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
        self, num_blocks: int, query: torch.Tensor | None, bounds: torch.Tensor | None
    ) -> Sequence[int]:
        """See BlockChoice. The last block is always read."""
        if query is None or bounds is None:
            raise ValueError("a choice by pages needs the query and the keys")
        num_heads, head_dim = bounds.shape[0], bounds.shape[3]
        heads = query.float().view(num_heads, -1, head_dim)
        signed = torch.cat((heads.clamp(max=0), heads.clamp(min=0)), 2)
        # [kv_heads, heads of each, blocks]
        scores = signed @ bounds.flatten(2).float().transpose(1, 2)
        relative = (scores - scores.amax(2, keepdim=True)).amax((0, 1))
        kept = relative.topk(self.most - 1).indices.sort().values.tolist()
        return [*kept, num_blocks - 1]
