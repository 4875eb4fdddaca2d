"""Degrees of parallelism of one engine, and the place of each rank in its mesh."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from engine.shard import Cut


@dataclass(frozen=True, slots=True)
class Degrees:
    """How an engine is divided over its ranks.

    tensor: ranks that share each layer. pipeline: stages, each of consecutive layers. context:
    ranks that share the tokens of a prompt, each with all weights of its stage. whole_experts: the
    ranks of a tensor-parallel group have whole experts instead of a slice of each. cut: how these
    ranks share linear layers. by_sequence: the ranks of a context have whole sequences of a step,
    and whole experts of each mixture, in place of ranges of tokens and all weights (data-parallel
    attention).
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    whole_experts: bool = False
    cut: Cut = "outputs"
    by_sequence: bool = False

    @property
    def num_expert_ranks(self) -> int:
        """Ranks among which whole experts are placed; 1 if each rank has all, or parts."""
        if self.by_sequence:
            return self.context
        return self.tensor if self.whole_experts else 1

    @property
    def context_option(self) -> str:
        """The option that sets `context`."""
        return "data_parallel_size" if self.by_sequence else "context_parallel_size"

    @property
    def num_summands(self) -> int:
        """Parts of the sums of a layer."""
        return self.tensor if self.cut == "sums" else 1

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline * self.context

    def place(self, rank: int) -> Place:
        """The place of a rank, 0 <= rank < num_ranks. Ranks of a tensor-parallel group are
        adjacent, because they exchange most; then those of a context; stages are farthest
        apart."""
        rest, tensor_rank = divmod(rank, self.tensor)
        stage, context_rank = divmod(rest, self.context)
        return Place(stage, context_rank, tensor_rank)

    def rank_of(self, place: Place) -> int:
        """Inverse of `place`."""
        group = place.stage * self.context + place.context_rank
        return group * self.tensor + place.tensor_rank

    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each tensor-parallel group."""
        size = self.tensor
        return tuple(tuple(range(at, at + size)) for at in range(0, self.num_ranks, size))

    def groups_of(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tensor-parallel group and the context group of a rank."""
        (tensor,) = (group for group in self.tensor_groups() if rank in group)
        (context,) = (group for group in self.context_groups() if rank in group)
        return tensor, context

    def context_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share a prompt's tokens, with the same part of each layer."""
        return tuple(
            tuple(self.rank_of(Place(stage, i, tensor)) for i in range(self.context))
            for stage in range(self.pipeline)
            for tensor in range(self.tensor)
        )

    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Ranks with the same part of each layer, by stage: a stage's states go to the next."""
        return tuple(
            tuple(self.rank_of(Place(stage, context, tensor)) for stage in range(self.pipeline))
            for context in range(self.context)
            for tensor in range(self.tensor)
        )


#: An engine in one process.
ONE_RANK = Degrees()


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place: its stage, and its number in the two groups that it belongs to there."""

    stage: int = 0
    context_rank: int = 0
    tensor_rank: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `number` of `size`, counted from 0: the layers of a rank. The first stage also has the
    embeddings and the output layer."""

    number: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.size - 1

    def layers(self, num_layers: int) -> range:
        """The stage's layers of a model with num_layers."""
        return stage_layers(num_layers, self.size)[self.number]


#: A model that is not divided by layers.
ALL_LAYERS = Stage()


def stage_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Layers of each stage, as even as possible. The first stages have fewer, because rank 0 also
    has the embeddings and the output layer."""
    least, num_longer = divmod(num_layers, num_stages)
    lengths = (least + (stage >= num_stages - num_longer) for stage in range(num_stages))
    return tuple(range(*ends) for ends in pairwise(accumulate(lengths, initial=0)))
