"""Tensor parallelism: the part of a decoder on each rank.

Every linear layer is split by outputs and has all inputs on every rank; the ranks concatenate the
outputs (engine/ranks/exchange.py). Each sum is therefore computed by one rank, in the same order as
with a single rank, and a part of any weight, quantised or not, is a range of its rows. See
docs/adr/0009-ranks-share-outputs.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.errors import ConfigError
from engine.families.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`, counted from 0. experts: with expert parallelism, the rank
    that has each expert of a mixture as a whole, by layer; without, ranks have parts of each."""

    rank: int
    size: int
    experts: tuple[tuple[int, ...], ...] = ()

    def part(self, num: int) -> range:
        """This rank's part of `num` rows. Parts have equal lengths, except that the last ones may
        be shorter."""
        length = -(-num // self.size)
        start = self.rank * length
        return range(min(start, num), min(start + length, num))

    def kv_heads(self, num_kv_heads: int) -> range:
        """KV heads that this rank's query heads read. If there are more ranks than KV heads,
        several ranks hold the same one."""
        if self.size <= num_kv_heads:
            return self.part(num_kv_heads)
        head = self.rank * num_kv_heads // self.size
        return range(head, head + 1)

    def of_expert(self, layer: int, expert: int) -> Shard:
        """The part of an expert that this rank holds."""
        if not self.experts:
            return self
        return WHOLE if self.experts[layer][expert] == self.rank else NOTHING

    def attention_config(self, config: ModelConfig) -> ModelConfig:
        """`config` with this rank's numbers of heads."""
        return replace(
            config,
            num_heads=len(self.part(config.num_heads)),
            num_kv_heads=len(self.kv_heads(config.num_kv_heads)),
        )


#: A model in one process.
WHOLE = Shard(0, 1)
#: No rows of anything.
NOTHING = Shard(1, 1)


#: Sizes that must be divisible by the number of ranks.
_SHARED = ("num_heads", "hidden_size", "intermediate_size")


def check_size(config: ModelConfig, size: int, *, has_whole_experts: bool = False) -> None:
    """Raise ConfigError unless `size` ranks can share the layers. has_whole_experts: ranks have
    these instead of parts of each."""
    if reason := _misfit(config, size, has_whole_experts):
        sizes = range(1, config.num_heads + 1)
        fitting = [str(n) for n in sizes if not _misfit(config, n, has_whole_experts)]
        raise ConfigError.of(
            "tensor_parallel_size", size, f"{reason}; this model takes {', '.join(fitting)}"
        )


def _misfit(config: ModelConfig, size: int, has_whole_experts: bool) -> str:
    """Reason that `size` ranks cannot share the layers; empty if they can."""
    traits, experts = config.traits, config.traits.experts
    numbers = {name: getattr(config, name) for name in _SHARED}
    if experts is not None and has_whole_experts:
        numbers["num_experts"] = experts.num_experts
    elif experts is not None:
        numbers["moe_intermediate_size"] = experts.intermediate_size
    for name, number in numbers.items():
        if number % size:
            return f"{name}={number} is no multiple of it"
    if traits.has_whole_qk_norm and size > 1:
        return f"a {config.family} model has one norm for all heads"
    if config.num_kv_heads % size and size % config.num_kv_heads:
        return f"num_kv_heads={config.num_kv_heads} is neither a multiple nor a divisor of it"
    return ""
