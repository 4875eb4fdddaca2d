"""A part of a model's KV: some layers, and some KV heads of each. A rank holds one part; two
workers of unequal degrees exchange the overlaps of their parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from baton.types import KvLayout
from engine.kv.groups.state import STATE
from engine.kv.range import ALL


@dataclass(frozen=True, slots=True)
class KvPart:
    """Layers [first_layer, first_layer + num_layers), as the model counts them, and KV heads
    [first_head, first_head + num_heads) of each; and layers with a state [first_state, first_state
    + num_states), counted among these (first_state is 0 without any)."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    first_state: int = 0
    num_states: int = 0

    @classmethod
    def whole(cls, layout: KvLayout) -> KvPart:
        return cls(0, layout.num_layers, 0, layout.num_kv_heads, 0, layout.num_state_layers)

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)

    @property
    def states(self) -> range:
        return range(self.first_state, self.first_state + self.num_states)

    def layers_of(self, group: int) -> range:
        """Layers of ALL groups with KV, or of the group of states. Raises ValueError for another
        group, which a part does not divide."""
        if group not in (ALL, STATE):
            raise ValueError(f"layers of group {group} are not divided")
        return self.layers if group == ALL else self.states

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
        states = _common(self.states, other.states) or range(0)
        return KvPart(layers.start, len(layers), heads.start, len(heads), states.start, len(states))

    def without_states(self) -> KvPart:
        return replace(self, first_state=0, num_states=0)

    def within(self, outer: KvPart) -> KvPart:
        """This part, counted from the first layers and head of `outer`, which contains it."""
        return replace(
            self,
            first_layer=self.first_layer - outer.first_layer,
            first_head=self.first_head - outer.first_head,
            first_state=self.first_state - outer.first_state if self.num_states else 0,
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
            num_state_layers=self.num_states,
            state_layer_bytes=whole.state_layer_bytes if self.num_states else 0,
        )


def covers(parts: Iterable[KvPart], whole: KvPart) -> bool:
    """Whether `parts`, within `whole`, contain each of its layers and heads, and each of its layers
    with a state, exactly once. The time is linear in their number, because a peer chooses it.

    If the corners of `whole` are the only ones that an odd number of parts have, each layer of each
    head is in an odd number of parts; in exactly one, because the sizes add up to that of `whole`.
    """
    corners, size = set[tuple[int, int]](), 0
    ends, num_states = set[int](), 0
    for part in parts:
        if part.overlap(whole) != part:
            return False
        corners ^= part.corners
        size += part.size
        ends ^= {part.states.start} ^ {part.states.stop}
        num_states += part.num_states
    is_whole = num_states == whole.num_states and ends == {whole.states.start} ^ {whole.states.stop}
    return is_whole and size == whole.size and corners == whole.corners


def are_of_ranks(parts: Iterable[KvPart], whole: KvPart) -> bool:
    """Whether `parts` may be those of a worker's ranks: together all of the model, in stages, with
    the states of a stage on each of its ranks."""
    distinct = set(parts)
    stages = {replace(p, first_head=whole.first_head, num_heads=whole.num_heads) for p in distinct}
    is_once = covers((part.without_states() for part in distinct), whole.without_states())
    return is_once and covers(stages, whole)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
