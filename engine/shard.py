"""Tensor parallelism: which part of a decoder each of several ranks holds, and how they put their
results together.

Every linear layer is cut by its outputs, and its inputs are whole on every rank: a rank computes
some outputs of each, and `gather` puts them side by side. So each sum is taken whole, by one rank,
in the order of one rank alone, and whatever form a weight has, quantised or not, a part of it is a
range of its rows. See docs/adr/0009-ranks-share-outputs.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from baton.errors import ConfigError
from engine.families.config import ModelConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """What rank `rank` of `size` ranks holds, counted from 0."""

    rank: int
    size: int

    def part(self, num: int) -> range:
        """This rank's part of `num` rows. Parts are of one length, but for the last where they do
        not come out even."""
        length = -(-num // self.size)
        start = self.rank * length
        return range(min(start, num), min(start + length, num))

    def kv_heads(self, num_kv_heads: int) -> range:
        """The KV heads that this rank's query heads read; several ranks hold the same one where
        there are more of them."""
        if self.size <= num_kv_heads:
            return self.part(num_kv_heads)
        head = self.rank * num_kv_heads // self.size
        return range(head, head + 1)

    def attention_config(self, config: ModelConfig) -> ModelConfig:
        """`config` with the number of heads that this rank has."""
        return replace(
            config,
            num_heads=len(self.part(config.num_heads)),
            num_kv_heads=len(self.kv_heads(config.num_kv_heads)),
        )


#: A model that one process holds alone.
WHOLE = Shard(0, 1)


class Ranks(Protocol):
    """The ranks of one model, as one of them sees the others. All call the same methods in the same
    order."""

    @property
    def shard(self) -> Shard: ...

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """The columns of `whole` [rows, columns] that are this rank's part."""
        ...

    def meet(self) -> None:
        """Returns when all ranks have called it: what they wrote before is there."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """part [rows, columns], of one shape on all ranks -> [rows, size * columns]: the parts of
        all, by rank.

        A meeting, too, even if there are no rows.
        """
        ...

    def gather_first(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        """part [rows, len(shard.part(num_columns))] -> [rows, num_columns] on rank 0. The others
        get their own part back."""
        ...


class Alone:
    """Ranks where there is one."""

    shard = WHOLE

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        return whole

    def meet(self) -> None:
        """See Ranks."""

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        return part

    def gather_first(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:  # noqa: ARG002
        """See Ranks."""
        return part


#: Sizes that all ranks have an equal part of.
_SHARED = ("num_heads", "hidden_size", "intermediate_size")


def check_size(config: ModelConfig, size: int) -> None:
    """Raise ConfigError unless `size` ranks can share the model."""
    if reason := _misfit(config, size):
        fitting = [str(n) for n in range(1, config.num_heads + 1) if not _misfit(config, n)]
        raise ConfigError.of(
            "tensor_parallel_size", size, f"{reason}; this model takes {', '.join(fitting)}"
        )


def _misfit(config: ModelConfig, size: int) -> str:
    """What of the model `size` ranks cannot share; empty if nothing."""
    traits, experts = config.traits, config.traits.experts
    numbers = {name: getattr(config, name) for name in _SHARED}
    if experts is not None:
        numbers["moe_intermediate_size"] = experts.intermediate_size
    for name, number in numbers.items():
        if number % size:
            return f"{name}={number} is no multiple of it"
    if traits.has_whole_qk_norm and size > 1:
        return f"a {config.family} model has one norm for all heads"
    if config.num_kv_heads % size and size % config.num_kv_heads:
        return f"num_kv_heads={config.num_kv_heads} is neither a multiple nor a divisor of it"
    return ""
