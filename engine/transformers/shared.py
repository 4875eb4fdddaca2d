"""Linear layers and attention of a transformers model on the ranks of a tensor-parallel group.

Each rank has its rows of every linear layer, and its heads of attention with their KV; the ranks
gather the results (docs/adr/0009-ranks-share-outputs.md). Everything else, layers with a state
included, runs whole on each rank.
"""

from __future__ import annotations

import torch

from engine.ranks.exchange import ALONE, Ranks
from engine.shard import Shard


class Share:
    """One rank's part of the results of a group, and the exchange of all parts, once the ranks have
    joined. shard: this rank's number in the group."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._ranks: Ranks = ALONE.tensor

    def join(self, ranks: Ranks) -> None:
        """Set the group. Before any exchange."""
        self._ranks = ranks

    def meet(self) -> None:
        """See Ranks."""
        self._ranks.meet()

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers, each at most 2^24."""
        parts = self._ranks.gather(torch.tensor([[number]], dtype=torch.float32))
        return int(parts.min())

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a weight or bias, with rows of zeros if other ranks have more."""
        own = self.shard.part(len(whole))
        part = whole[own.start : own.stop]
        missing = -(-len(whole) // self.shard.size) - len(own)
        return torch.cat((part, part.new_zeros(missing, *part.shape[1:]))) if missing else part

    def heads(self, whole: torch.Tensor, num_kv_heads: int | None = None) -> torch.Tensor:
        """This rank's query heads of `whole` [heads, ...]; its KV heads if num_kv_heads is given,
        the number of all."""
        shard = self.shard
        own = shard.part(len(whole)) if num_kv_heads is None else shard.kv_heads(num_kv_heads)
        return whole[own.start : own.stop]

    def gather(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        """part [rows, columns] of each rank -> [rows, num_columns], contiguous."""
        return self._ranks.gather(part)[:, :num_columns].contiguous()
