"""Which rank of a sender sends which part of a model's KV to which rank of a receiver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from engine.kv.part import KvPart
from engine.kv.range import KvRange


@dataclass(frozen=True, slots=True)
class Route:
    """target: the receiver's rank. part: what both ranks hold, as the model counts."""

    target: int
    part: KvPart


@lru_cache(maxsize=256)
def routes_from(
    rank: int, sources: tuple[KvPart, ...], targets: tuple[KvPart, ...]
) -> tuple[Route, ...]:
    """Parts that `rank` of the sender sends. Parts of one worker's ranks are equal or disjoint.

    Together the ranks send each receiving rank all of its part, once. Ranks that hold the same
    part divide the receiving ranks among them, the first to the first. States, which several of the
    sender's ranks hold beside other heads, go with the receiving rank's first head.
    """
    own = sources[rank]
    holders = [number for number, part in enumerate(sources) if part == own]
    at = holders.index(rank)
    return tuple(
        Route(number, both if both.first_head == target.first_head else both.without_states())
        for number, target in enumerate(targets)
        if number % len(holders) == at and (both := own.overlap(target))
    )


def clipped_to(part: KvPart, piece: KvRange) -> KvRange | None:
    """The layers of `part` in a piece of the model's layers, counted from the part's first one;
    None if there are none. Raises ValueError for a piece of another group, see KvPart.layers_of."""
    own = part.layers_of(piece.group)
    first, end = max(piece.first_layer, own.start), min(piece.end_layer, own.stop)
    if first >= end:
        return None
    return replace(piece, first_layer=first - own.start, num_layers=end - first)


def differing_size(parts: Sequence[KvPart], whole: KvPart) -> tuple[str, str, str] | None:
    """(field, ours, theirs) if `parts` are of a model with other sizes than `whole`."""
    sizes = {
        "num_layers": (max(part.layers.stop for part in parts), whole.num_layers),
        "num_kv_heads": (max(part.heads.stop for part in parts), whole.num_heads),
        "num_state_layers": (max(part.states.stop for part in parts), whole.num_states),
    }
    found = ((name, str(a), str(b)) for name, (a, b) in sizes.items() if a != b)
    return next(found, None)
