"""How the linear layers of a decoder layer are cut among ranks: what these exchange, and when.

The first of two layers (queries, keys and values; gate and up) is cut by its outputs in either way.
The second (output, down) is cut by its outputs, or by its inputs, which are the outputs of the
first on the same rank (Megatron-LM, arXiv 1909.08053): see docs/adr/0009.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from engine.ranks.exchange import Ranks
from engine.shard import Cut

#: Runs the second layer, with a residual to add.
Product = Callable[[torch.Tensor | None], torch.Tensor]


class LayerCut(Protocol):
    """The exchanges of one rank. Results are complete, with the same bits on every rank."""

    def inputs(self, part: torch.Tensor) -> torch.Tensor:
        """Inputs of the second layer, from this rank's outputs [rows, columns] of the first."""
        ...

    def whole(self, product: Product) -> torch.Tensor:
        """The second layer's outputs [rows, hidden]."""
        ...

    def add(self, product: Product, hidden: torch.Tensor) -> torch.Tensor:
        """The second layer's outputs plus hidden [rows, hidden]; may reuse the memory of hidden."""
        ...

    def of_experts(self, results: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """Parts for `whole` and `add`: results [own rows, hidden] of this rank's experts, in order
        -> [all rows, columns of a part]. owners [all rows] int64: the rank of each row."""
        ...


class OutputsCut:
    """Each sum is taken by one rank, in the order of one process. Four exchanges a layer."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def inputs(self, part: torch.Tensor) -> torch.Tensor:
        return self._ranks.gather(part)

    def whole(self, product: Product) -> torch.Tensor:
        return self._ranks.gather(product(None))

    def add(self, product: Product, hidden: torch.Tensor) -> torch.Tensor:
        return self._ranks.gather(product(self._ranks.own(hidden)))

    def of_experts(self, results: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        counts = owners.bincount(minlength=self._ranks.shard.size).tolist()
        exchanged = self._ranks.exchange(results, counts)
        return torch.empty_like(exchanged).index_copy_(0, owners.argsort(stable=True), exchanged)


class SumsCut:
    """Each rank takes a part of every sum. Two exchanges a layer; bits depend on the number of
    ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def inputs(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def whole(self, product: Product) -> torch.Tensor:
        return self._ranks.reduce(product(None))

    def add(self, product: Product, hidden: torch.Tensor) -> torch.Tensor:
        return self._ranks.reduce(product(None), hidden)

    def of_experts(self, results: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        own = (owners == self._ranks.shard.rank).nonzero().flatten()
        return results.new_zeros(len(owners), results.shape[1]).index_copy_(0, own, results)


CUTS: Mapping[Cut, Callable[[Ranks], LayerCut]] = {"outputs": OutputsCut, "sums": SumsCut}
