"""A piece of a sequence's KV: what pools copy and what the KV channel moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: KvRange.group of a piece of all layers that keep rows of tokens, whatever their groups.
ALL: Final = 0


@dataclass(frozen=True, slots=True)
class KvRange:
    """Tokens [first_token, end_token) of layers [first_layer, end_layer).

    group: number of a LayerGroup, which counts its layers from 0; or ALL, which counts the model's.
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
