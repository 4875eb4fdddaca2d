"""The experts of a layer on one rank: a part of each, or some as a whole (expert parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton_kernels.experts import GroupedLinear, grouped_linear, order_rows
from baton_kernels.layer import Experts, Mlp
from baton_kernels.linear import Linear
from engine.ranks.cuts import LayerCut
from engine.torch.adapters import AdapterLayer, LowRankGroup

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
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        gate: Gate,
        cut: LayerCut,
        added: Sequence[tuple[AdapterLayer, Any]] = (),
    ) -> torch.Tensor:
        """Run x [tokens, hidden] through its chosen experts, [tokens, chosen] int32: this rank's
        part of their outputs, [tokens * chosen, columns of a part]. added: adapters' additions,
        each for its rows of x; only with one rank."""
        num_tokens, num_chosen = chosen.shape
        num_experts = len(self.down.linears)
        order = order_rows(chosen, num_experts)
        own = [
            _Own(layer, rows, chosen[rows], num_experts)
            for layer, rows in added
            if layer.gate_up is not None or layer.down is not None
        ]
        inner = grouped_linear(x, chosen, self.gate_up, num_chosen, order)
        for mine in own:
            mine.add_gate_up(inner, x)
        inner = cut.inputs(gate(inner))
        parts = grouped_linear(inner, chosen, self.down, 1, order)
        for mine in own:
            mine.add_down(parts, inner.view(num_tokens, num_chosen, inner.shape[1]))
        return parts


class _Own:
    """One adapter's additions to the experts of its tokens. rows [rows] int64: their places among
    all; chosen [rows, chosen experts] int32."""

    def __init__(
        self, layer: AdapterLayer, rows: torch.Tensor, chosen: torch.Tensor, num_experts: int
    ) -> None:
        self._layer, self._rows, self._chosen = layer, rows, chosen
        self._order = order_rows(chosen, num_experts)

    def add_gate_up(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add in place to y [all tokens * chosen experts, num_out], for x [all tokens, num_in]."""
        if (group := self._layer.gate_up) is not None:
            self._add(y, group, x[self._rows], self._chosen.shape[1])

    def add_down(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Likewise, for x [all tokens, chosen experts, num_in]."""
        if (group := self._layer.down) is not None:
            self._add(y, group, x[self._rows].flatten(0, 1), 1)

    def _add(self, y: torch.Tensor, group: LowRankGroup, x: torch.Tensor, repeat: int) -> None:
        low = grouped_linear(x, self._chosen, group.down, repeat, self._order)
        own = grouped_linear(low, self._chosen, group.up, 1, self._order)
        shape = (-1, self._chosen.shape[1], y.shape[1])
        y.view(shape)[self._rows] += own.view(shape)


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
