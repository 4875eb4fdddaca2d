"""Attention sinks and a window (Xiao et al. 2023, StreamingLLM): the first block, to which softmax
gives what it needs nowhere else, and the last ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_NUM_SINKS = 1


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """See engine.sparse.backend.BlockChoice."""

    most: int
    reads_keys: bool = False

    def choose(
        self,
        num_blocks: int,
        query: torch.Tensor | None,  # noqa: ARG002
        bounds: torch.Tensor | None,  # noqa: ARG002
    ) -> Sequence[int]:
        """See BlockChoice."""
        window = self.most - _NUM_SINKS
        return [*range(_NUM_SINKS), *range(num_blocks - window, num_blocks)]
