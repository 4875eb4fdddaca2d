"""Layers that attend to all tokens: a sequence keeps the KV of each."""

from __future__ import annotations

from typing import ClassVar, Final

from baton.types import KvLayout
from engine.kv.groups.group import LayerGroup

FULL: Final = 1


class FullGroup(LayerGroup):
    """Keys and values, or one latent row, of every token. Always in the blocks."""

    number: ClassVar[int] = FULL

    @classmethod
    def of(cls, layout: KvLayout) -> FullGroup | None:
        """See LayerGroup."""
        layers = sorted(set(range(layout.num_layers)).difference(layout.windowed_layers))
        return cls(layers, layout.token_layer_bytes) if layers else None

    def kept_start(self, num_tokens: int) -> int:  # noqa: ARG002
        """See LayerGroup."""
        return 0
