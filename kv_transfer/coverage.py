"""Which (token, layer) pairs of a sequence have arrived, each exactly once."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from baton.types import KvRange


class Coverage:
    """Per group of layers, the disjoint, sorted, maximal token intervals that have arrived.

    A group is split where a piece needs it: most pieces are of all layers, and cost no more than
    one layer would.
    """

    def __init__(self, num_layers: int) -> None:
        self._groups = [_Group(0, num_layers, [], [])]

    def add(self, piece: KvRange) -> bool:
        """Count `piece` as arrived; False, with no interval changed, if any of it had arrived
        before."""
        start, end = piece.first_token, piece.end_token
        self._split(piece.first_layer)
        self._split(piece.end_layer)
        groups = [
            group
            for group in self._groups
            if piece.first_layer <= group.first_layer and group.end_layer <= piece.end_layer
        ]
        if any(group.overlaps(start, end) for group in groups):
            return False
        for group in groups:
            group.insert(start, end)
        return True

    def is_exactly(self, first_token: int, end_token: int) -> bool:
        """Whether tokens [first_token, end_token) of every layer have arrived, and no other."""
        is_empty = first_token == end_token
        starts, ends = ([], []) if is_empty else ([first_token], [end_token])
        return all(group.starts == starts and group.ends == ends for group in self._groups)

    def _split(self, layer: int) -> None:
        """Let a group begin at `layer`, unless all end there."""
        for index, group in enumerate(self._groups):
            if group.first_layer < layer < group.end_layer:
                rest = _Group(layer, group.end_layer, group.starts.copy(), group.ends.copy())
                group.end_layer = layer
                self._groups.insert(index + 1, rest)
                return


@dataclass(slots=True)
class _Group:
    """Layers [first_layer, end_layer), of which the same tokens have arrived: starts[i] <= token <
    ends[i], and ends[i] < starts[i + 1]."""

    first_layer: int
    end_layer: int
    starts: list[int]
    ends: list[int]

    def overlaps(self, start: int, end: int) -> bool:
        after = bisect_left(self.starts, end)
        return after > 0 and self.ends[after - 1] > start

    def insert(self, start: int, end: int) -> None:
        starts, ends = self.starts, self.ends
        at = bisect_left(starts, start)
        joins_next = at < len(starts) and starts[at] == end
        joins_previous = at > 0 and ends[at - 1] == start
        if joins_previous and joins_next:
            del starts[at], ends[at - 1]
        elif joins_previous:
            ends[at - 1] = end
        elif joins_next:
            starts[at] = start
        else:
            starts.insert(at, start)
            ends.insert(at, end)
