"""Minima and maxima of the keys of each block, kept from step to step.

A block is summarised when a step first asks for it, and again once it holds the KV of other tokens.
Its last key in the last layer tells: that key depends on all tokens before it. The block that is
being written is none of these.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self._rows: torch.Tensor | None = None

    def refresh(self, pool: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Summarise those of these whole blocks that hold other keys than when they last were."""
        if self._rows is None:
            num_blocks, num_layers, _, *sizes = pool.shape
            head = (sizes[0], sizes[2])
            self._rows = pool.new_zeros((num_blocks, num_layers, 2, *head))
            self._last_keys = pool.new_full((num_blocks, *head), torch.nan)
        blocks = torch.tensor(block_ids, device=pool.device)
        last_keys = pool[blocks, -1, 0, :, -1]
        is_new = (last_keys != self._last_keys[blocks]).flatten(1).any(1)
        self._last_keys[blocks] = last_keys
        stale = blocks[is_new]
        for first in range(0, len(stale), _CHUNK):
            some = stale[first : first + _CHUNK]
            keys = pool[some, :, 0]
            self._rows[some, :, 0] = keys.amin(3)
            self._rows[some, :, 1] = keys.amax(3)

    def of(self, layer: int, block_ids: Sequence[int]) -> torch.Tensor:
        """Minima and maxima [blocks, 2, kv_heads, head_dim] of blocks that were refreshed."""
        assert self._rows is not None
        return self._rows[torch.tensor(block_ids, device=self._rows.device), layer]
