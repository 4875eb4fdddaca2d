"""The part of a model's KV that each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.types import KvLayout
from engine.kv.part import KvPart
from engine.ranks.mesh import Degrees, stage_layers
from engine.shard import Shard


def rank_parts(
    layout: KvLayout, degrees: Degrees, states: Sequence[range] | None = None
) -> tuple[KvPart, ...]:
    """By rank: the layers of its stage, and the KV heads that its query heads read. layout: of the
    whole model. states: by stage, its layers with a state, whole on each rank; None without any."""
    stages, found = stage_layers(layout.num_layers, degrees.pipeline), []
    for place in map(degrees.place, range(degrees.num_ranks)):
        layers = stages[place.stage]
        heads = Shard(place.tensor_rank, degrees.tensor).kv_heads(layout.num_kv_heads)
        own = states[place.stage] if states else range(0)
        found.append(
            KvPart(layers.start, len(layers), heads.start, len(heads), own.start, len(own))
        )
    return tuple(found)


def kv_holders(degrees: Degrees) -> tuple[int, ...]:
    """By rank: the first rank of its context, which holds its KV."""
    places = map(degrees.place, range(degrees.num_ranks))
    return tuple(degrees.rank_of(replace(place, context_rank=0)) for place in places)
