"""Which (token, layer) pairs of a sequence have arrived, each exactly once."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvRange:
    """Tokens [first_token, end_token) of layers [first_layer, end_layer)."""

    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_tokens

    @property
    def end_layer(self) -> int:
        return self.first_layer + self.num_layers

    def num_bytes(self, token_layer_bytes: int) -> int:
        return self.num_tokens * self.num_layers * token_layer_bytes


class Coverage:
    """Per layer, the disjoint, sorted, maximal token intervals that have arrived."""

    def __init__(self, num_layers: int) -> None:
        # Intervals of a layer: starts[i] <= token < ends[i], and ends[i] < starts[i + 1].
        self._starts: list[list[int]] = [[] for _ in range(num_layers)]
        self._ends: list[list[int]] = [[] for _ in range(num_layers)]

    def add(self, piece: KvRange) -> bool:
        """Count `piece` as arrived; False, with nothing changed, if any of it had arrived before."""
        start, end = piece.first_token, piece.end_token
        all_ends = self._ends[piece.first_layer : piece.end_layer]
        if all(ends and ends[-1] == start for ends in all_ends):
            # What comes in order, as nearly all does, grows the last interval of each layer.
            for ends in all_ends:
                ends[-1] = end
            return True
        layers = range(piece.first_layer, piece.end_layer)
        if any(self._overlaps(layer, start, end) for layer in layers):
            return False
        for layer in layers:
            self._insert(layer, start, end)
        return True

    def is_exactly(self, first_token: int, end_token: int) -> bool:
        """Whether tokens [first_token, end_token) of every layer have arrived, and no other."""
        if first_token == end_token:
            return not any(self._starts)
        return all(starts == [first_token] for starts in self._starts) and all(
            ends == [end_token] for ends in self._ends
        )

    def _overlaps(self, layer: int, start: int, end: int) -> bool:
        starts, ends = self._starts[layer], self._ends[layer]
        after = bisect_left(starts, end)
        return after > 0 and ends[after - 1] > start

    def _insert(self, layer: int, start: int, end: int) -> None:
        starts, ends = self._starts[layer], self._ends[layer]
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
