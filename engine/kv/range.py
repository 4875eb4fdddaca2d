"""A range of a sequence's KV: the unit of copies by pools and transfers by the KV channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: KvRange.group for a range over all layers with token rows, of any group.
ALL: Final = 0


@dataclass(frozen=True, slots=True)
class KvRange:
    """Tokens [first_token, end_token) of layers [first_layer, end_layer).

    group: number of a LayerGroup, with its layers counted from 0; or ALL, with the model's layer
    numbers.
    """

    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    group: int = ALL

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_tokens

    @property
    def end_layer(self) -> int:
        return self.first_layer + self.num_layers

    def num_bytes(self, token_layer_bytes: int) -> int:
        return self.num_tokens * self.num_layers * token_layer_bytes
