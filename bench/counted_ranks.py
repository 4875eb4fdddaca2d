"""Counts what rank 0 of an engine receives from the others over shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch

from engine.ranks import shared_ranks
from engine.ranks.shared_ranks import SharedRanks
from engine.shard import Shard


@dataclass
class Counts:
    """Exchanges of rank 0, and bytes of other ranks that it has read."""

    num_exchanges: int = 0
    num_bytes: int = 0

    def reset(self) -> None:
        """Begin anew."""
        self.num_exchanges = self.num_bytes = 0


@contextmanager
def count_exchanges() -> Iterator[Counts]:
    """Counts the exchanges of engines that are loaded in the body, as long as they live."""
    counts = Counts()

    class CountedRanks(SharedRanks):
        def __init__(self, memory: torch.Tensor, shard: Shard, staging_bytes: int) -> None:
            super().__init__(memory, shard, staging_bytes)
            self._counts = Counts() if shard.rank else counts

        def meet(self) -> None:
            self._counts.num_exchanges += 1
            super().meet()

        def exchange(self, part: torch.Tensor, num_rows: Sequence[int]) -> torch.Tensor:
            before = self._counts.num_bytes
            received = super().exchange(part, num_rows)
            # Of each staged row it reads its own columns.
            self._counts.num_bytes = before + (self._counts.num_bytes - before) // self.shard.size
            return received

        def _staged(self, rank: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
            if rank != self.shard.rank:
                self._counts.num_bytes += rows * columns * dtype.itemsize
            return super()._staged(rank, rows, columns, dtype)

    with patch.object(shared_ranks, "SharedRanks", CountedRanks):
        yield counts
