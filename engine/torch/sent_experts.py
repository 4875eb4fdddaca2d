"""Experts of ranks with sequences of their own: tokens go to the ranks of their experts, and the
results come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton_kernels.experts import grouped_linear, order_rows
from baton_kernels.layer import Experts
from baton_kernels.linear import Linear
from engine.ranks.cuts import LayerCut
from engine.ranks.exchange import Ranks
from engine.torch.grouped_experts import Gate, GroupedExperts


@dataclass(frozen=True, slots=True)
class SentExperts:
    """Experts of which each rank has some as a whole; each rank has other tokens.

    ranks: the ranks among which experts are placed. own: this rank's experts. order [experts]
    int64: all experts, by rank; places [experts] int64: the place of each in that order; sizes: by
    rank, the number of its experts. loads [experts] int64: all ranks' tokens of each so far.
    """

    ranks: Ranks
    own: GroupedExperts
    order: torch.Tensor
    places: torch.Tensor
    sizes: list[int]
    loads: torch.Tensor

    def parts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        gate: Gate,
        cut: LayerCut,  # noqa: ARG002
    ) -> torch.Tensor:
        """See GroupedExperts; whole outputs of this rank's tokens. All ranks call this at once,
        those without tokens, too."""
        places = self.places[chosen.flatten().long()]
        counts = places.bincount(minlength=len(self.places))
        by_place = places.argsort(stable=True)
        # [ranks, experts]: the rows of each rank for each expert, experts by rank.
        all_counts = self.ranks.gather(counts[None]).view(len(self.sizes), -1)
        self.loads.add_(all_counts.sum(0)[self.places])
        by_owner = torch.split(all_counts, self.sizes, 1)
        of_each = [part.sum(1).tolist() for part in by_owner]
        sent = [list(row) for row in zip(*of_each, strict=True)]
        rows = self.ranks.send_rows(x[by_place // chosen.shape[1]], sent)
        mine = by_owner[self.ranks.shard.rank]
        numbers = torch.arange(mine.shape[1], dtype=torch.int32, device=x.device)
        numbers = numbers.repeat(len(mine)).repeat_interleave(mine.flatten())
        order = order_rows(numbers, len(self.own.down.linears))
        inner = gate(grouped_linear(rows, numbers, self.own.gate_up, 1, order))
        results = grouped_linear(inner, numbers, self.own.down, 1, order)
        back = self.ranks.send_rows(results, of_each)
        return torch.empty_like(back).index_copy_(0, by_place, back)


def send_experts(
    mlp: Experts[Linear, torch.Tensor], ranks: Ranks, device: torch.device
) -> SentExperts:
    """The experts of a layer on this rank. device: of the parameters."""
    owners: Sequence[int] = mlp.owners
    order = sorted(range(len(owners)), key=lambda expert: owners[expert])
    own = [mlp.experts[expert] for expert in order if owners[expert] == ranks.shard.rank]
    return SentExperts(
        ranks,
        GroupedExperts.of(own),
        torch.tensor(order, device=device),
        torch.tensor(order, device=device).argsort(),
        [owners.count(rank) for rank in range(ranks.shard.size)],
        torch.zeros(len(order), dtype=torch.int64, device=device),
    )
