"""Minima and maxima of the keys of each block, kept from step to step.

A block is summarised when a step first asks for it, and again once it holds the KV of other tokens.
Its last key in the last layer tells: that key depends on all tokens of the block, unless it is the
first layer, too. The block that is being written is none of these.
"""

from __future__ import annotations

import torch

#: Rows of a head that are kept at most for each block and layer: minimum, maximum, and the last
#: key, of one layer.
KEPT_ROWS = 3
#: Blocks whose keys are copied at once.
_CHUNK = 64


class KeySummaries:
    """Of one pool [blocks, layers, 2, kv_heads, block_size, head_dim]. Used by the engine's
    thread."""

    def __init__(self) -> None:
        self._bounds: torch.Tensor | None = None

    def refresh(self, pool: torch.Tensor, blocks: torch.Tensor) -> None:
        """Summarise those of these whole blocks [n] int64 that hold other keys than when they last
        were."""
        if self._bounds is None:
            num_blocks, num_layers, _, num_heads, _, head_dim = pool.shape
            self._bounds = pool.new_zeros((num_layers, num_heads, num_blocks, 2, head_dim))
            self._last_keys = pool.new_full((num_blocks, num_heads, head_dim), torch.nan)
        last_keys = pool[:, -1, 0, :, -1].index_select(0, blocks)
        is_new = (last_keys != self._last_keys.index_select(0, blocks)).flatten(1).any(1)
        self._last_keys[blocks] = last_keys
        # A key of the first layer says nothing of the tokens before it.
        stale = blocks[is_new] if pool.shape[1] > 1 else blocks
        for first in range(0, len(stale), _CHUNK):
            some = stale[first : first + _CHUNK]
            keys = pool[some, :, 0].permute(1, 2, 0, 3, 4)
            self._bounds[:, :, some] = torch.stack((keys.amin(3), keys.amax(3)), 3)

    def of(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Minima and maxima [kv_heads, n, 2, head_dim] of refreshed blocks [n]."""
        if self._bounds is None:
            raise ValueError("no block has been summarised")
        return self._bounds[layer].index_select(1, blocks)
