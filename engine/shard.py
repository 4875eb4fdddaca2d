"""Tensor parallelism: the part of a decoder on each rank.

By default every linear layer is cut by its outputs and has all inputs on every rank; the ranks
concatenate the outputs (engine/ranks/exchange.py). Each sum is therefore computed by one rank, in
the same order as with a single rank, and a part of any weight, quantised or not, is a range of its
rows. See docs/adr/0009-ranks-share-outputs.md. Cut by sums, every second layer is cut by its
inputs: see engine/ranks/cuts.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from baton.errors import ConfigError
from engine.families.config import ModelConfig

#: How ranks share the linear layers: each output is computed by one, or each is a sum of parts.
Cut = Literal["outputs", "sums"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`, counted from 0. experts: with expert parallelism, the rank
    that has each expert of a mixture as a whole, by layer; without, ranks have parts of each.
    holder: this rank's number among those; None for `rank`."""

    rank: int
    size: int
    experts: tuple[tuple[int, ...], ...] = ()
    cut: Cut = "outputs"
    holder: int | None = None

    def part(self, num: int) -> range:
        """This rank's part of `num` rows. Parts have equal lengths, except that the last ones may
        be shorter."""
        length = -(-num // self.size)
        start = self.rank * length
        return range(min(start, num), min(start + length, num))

    def second(self, num_out: int, num_in: int) -> tuple[range, range]:
        """Outputs and inputs of this rank's part of a layer that reads another's outputs."""
        if self.cut == "sums":
            return range(num_out), self.part(num_in)
        return self.part(num_out), range(num_in)

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
        holder = self.rank if self.holder is None else self.holder
        return WHOLE if self.experts[layer][expert] == holder else NOTHING

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


def check_size(
    config: ModelConfig,
    size: int,
    *,
    has_whole_experts: bool = False,
    cut: Cut = "outputs",
    is_packed: bool = False,
) -> None:
    """Raise ConfigError unless `size` ranks can share the layers. has_whole_experts: ranks have
    these instead of parts of each. is_packed: weights with packed_bytes stay as they are stored."""
    group = 0
    if cut == "sums" and (stored := config.quantization) is not None:
        group = stored.group_size or (stored.packed_group if is_packed else 0)
    if reason := _misfit(config, size, has_whole_experts, group):
        sizes = range(1, config.num_heads + 1)
        fitting = [str(n) for n in sizes if not _misfit(config, n, has_whole_experts, group)]
        raise ConfigError.of(
            "tensor_parallel_size", size, f"{reason}; this model takes {', '.join(fitting)}"
        )


def _misfit(config: ModelConfig, size: int, has_whole_experts: bool, group: int) -> str:
    """Reason that `size` ranks cannot share the layers; empty if they can. group: inputs that share
    a scale, where layers are cut by their inputs; else 0."""
    traits, experts = config.traits, config.traits.experts
    numbers = {name: getattr(config, name) for name in _SHARED}
    if experts is not None and has_whole_experts:
        numbers["num_experts"] = experts.num_experts
    elif experts is not None:
        numbers["moe_intermediate_size"] = experts.intermediate_size
    for name, number in numbers.items():
        if number % size:
            return f"{name}={number} is no multiple of it"
    if not Shard(size - 1, size).part(config.vocab_size):
        return f"vocab_size={config.vocab_size} leaves one of them without rows"
    if traits.has_whole_qk_norm and size > 1:
        return f"a {config.family} model has one norm for all heads"
    if config.num_kv_heads % size and size % config.num_kv_heads:
        return f"num_kv_heads={config.num_kv_heads} is neither a multiple nor a divisor of it"
    if group and size > 1:
        for name, number in _second_inputs(config, has_whole_experts).items():
            if number % (group * size):
                return (
                    f"with tensor_parallel_cut=sums {name}={number} is no multiple of it times the "
                    f"{group} weights of a scale"
                )
    return ""


def _second_inputs(config: ModelConfig, has_whole_experts: bool) -> dict[str, int]:
    """Inputs of the quantised layers that are cut by them."""
    latent, experts = config.traits.latent, config.traits.experts
    head_dim = config.head_dim if latent is None else latent.value_dim
    found = {
        "num_heads * head_dim": config.num_heads * head_dim,
        "intermediate_size": config.intermediate_size,
    }
    if experts is not None and experts.shared_size:
        found["shared_size"] = experts.shared_size
    of_experts = {}
    if experts is not None and not has_whole_experts:
        of_experts["moe_intermediate_size"] = experts.intermediate_size
    stored = config.quantization
    return of_experts if stored is not None and stored.only_experts else found | of_experts
