"""A part of a model's KV: some layers, and some KV heads of each. A rank holds one part; two
workers of unequal degrees exchange the overlaps of their parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from baton.types import KvLayout


@dataclass(frozen=True, slots=True)
class KvPart:
    """Layers [first_layer, first_layer + num_layers), as the model counts them, and KV heads
    [first_head, first_head + num_heads) of each."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int

    @classmethod
    def whole(cls, layout: KvLayout) -> KvPart:
        return cls(0, layout.num_layers, 0, layout.num_kv_heads)

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)

    @property
    def size(self) -> int:
        """Layers of all heads."""
        return self.num_layers * self.num_heads

    @property
    def corners(self) -> set[tuple[int, int]]:
        """(layer, head) at the ends of both ranges."""
        layers, heads = self.layers, self.heads
        return {
            (at, head) for at in (layers.start, layers.stop) for head in (heads.start, heads.stop)
        }

    def overlap(self, other: KvPart) -> KvPart | None:
        """What both have; None if nothing."""
        layers, heads = _common(self.layers, other.layers), _common(self.heads, other.heads)
        if not layers or not heads:
            return None
        return KvPart(layers.start, len(layers), heads.start, len(heads))

    def within(self, outer: KvPart) -> KvPart:
        """This part, counted from the first layer and head of `outer`, which contains it."""
        return replace(
            self,
            first_layer=self.first_layer - outer.first_layer,
            first_head=self.first_head - outer.first_head,
        )

    def layout(self, whole: KvLayout) -> KvLayout:
        """The layout of this part of a model with the layout `whole`: its layers counted from 0.
        The fingerprint is the model's."""
        own = self.layers
        return replace(
            whole,
            num_layers=self.num_layers,
            num_kv_heads=self.num_heads,
            windowed_layers=tuple(i - own.start for i in whole.windowed_layers if i in own),
            window=whole.window if any(i in own for i in whole.windowed_layers) else 0,
        )


def covers(parts: Iterable[KvPart], whole: KvPart) -> bool:
    """Whether `parts`, within `whole`, contain each of its layers and heads exactly once. The time
    is linear in their number, because a peer chooses it.

    If the corners of `whole` are the only ones that an odd number of parts have, each layer of each
    head is in an odd number of parts; in exactly one, because the sizes add up to that of `whole`.
    """
    corners, size = set[tuple[int, int]](), 0
    for part in parts:
        if part.overlap(whole) != part:
            return False
        corners ^= part.corners
        size += part.size
    return size == whole.size and corners == whole.corners


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
