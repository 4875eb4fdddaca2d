"""The experts of a layer on one rank: a part of each, or some as a whole (expert parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton_kernels.experts import GroupedLinear, grouped_linear, order_rows
from baton_kernels.layer import Experts, Mlp
from baton_kernels.linear import Linear
from engine.ranks.cuts import LayerCut

#: Combines gate and up into one row.
Gate = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """Experts with outputs divided among the ranks, or that are all here."""

    gate_up: GroupedLinear
    down: GroupedLinear

    @classmethod
    def of(cls, experts: Sequence[Mlp[Linear]]) -> GroupedExperts:
        return cls(
            GroupedLinear([expert.gate_up for expert in experts]),
            GroupedLinear([expert.down for expert in experts]),
        )

    def parts(
        self, x: torch.Tensor, chosen: torch.Tensor, gate: Gate, cut: LayerCut
    ) -> torch.Tensor:
        """Run x [tokens, hidden] through its chosen experts, [tokens, chosen] int32: this rank's
        part of their outputs, [tokens * chosen, columns of a part]."""
        order = order_rows(chosen, len(self.down.linears))
        inner = gate(grouped_linear(x, chosen, self.gate_up, chosen.shape[1], order))
        return grouped_linear(cut.inputs(inner), chosen, self.down, 1, order)


@dataclass(frozen=True, slots=True)
class PlacedExperts:
    """Experts of which each rank has some as a whole. Rows of other ranks' experts are skipped
    here.

    rank: this one. owners [experts] int64: the rank of each; numbers [experts] int32: its number
    among its rank's. loads [experts] int64: tokens of each so far.
    """

    rank: int
    own: GroupedExperts
    owners: torch.Tensor
    numbers: torch.Tensor
    loads: torch.Tensor

    def parts(
        self, x: torch.Tensor, chosen: torch.Tensor, gate: Gate, cut: LayerCut
    ) -> torch.Tensor:
        """See GroupedExperts."""
        experts = chosen.flatten().long()
        self.loads.add_(experts.bincount(minlength=len(self.loads)))
        owners = self.owners[experts]
        rows = (owners == self.rank).nonzero().flatten()
        numbers = self.numbers[experts[rows]]
        order = order_rows(numbers, len(self.own.down.linears))
        inner = x[rows // chosen.shape[1]]
        inner = gate(grouped_linear(inner, numbers, self.own.gate_up, 1, order))
        return cut.of_experts(grouped_linear(inner, numbers, self.own.down, 1, order), owners)


def group_experts(
    mlp: Experts[Linear, torch.Tensor], rank: int, device: torch.device
) -> GroupedExperts | PlacedExperts:
    """The experts of a layer on this rank. device: of the parameters."""
    if not mlp.owners:
        return GroupedExperts.of(mlp.experts)
    own = [expert for expert, owner in zip(mlp.experts, mlp.owners, strict=True) if owner == rank]
    numbers = [mlp.owners[:i].count(owner) for i, owner in enumerate(mlp.owners)]
    return PlacedExperts(
        rank,
        GroupedExperts.of(own),
        torch.tensor(mlp.owners, device=device),
        torch.tensor(numbers, dtype=torch.int32, device=device),
        torch.zeros(len(numbers), dtype=torch.int64, device=device),
    )
