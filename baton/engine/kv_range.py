"""Which part of a sequence's KV: what pools copy, and the KV channel moves."""

from __future__ import annotations

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
