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
    """Whether `parts`, within `whole`, contain each of its layers and heads exactly once."""
    found = list(parts)
    if (
        sum(part.num_layers * part.num_heads for part in found)
        != whole.num_layers * whole.num_heads
    ):
        return False
    return not any(
        one.overlap(other) for at, one in enumerate(found) for other in found[at + 1 :]
    ) and all(part.overlap(whole) == part for part in found)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
