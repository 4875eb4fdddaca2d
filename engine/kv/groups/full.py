"""Layers that attend to all tokens and keep the KV of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from baton.types import KvLayout
from engine.kv.groups.group import LayerGroup

FULL: Final = 1


class FullGroup(LayerGroup):
    """Keys and values, or one latent row, of every token, always in the blocks."""

    number: ClassVar[int] = FULL

    @classmethod
    def of(cls, layout: KvLayout, rest: Sequence[int]) -> FullGroup | None:
        """See LayerGroup: all layers that are left."""
        return cls(rest, layout.token_layer_bytes) if rest else None

    def kept_start(self, num_tokens: int) -> int:  # noqa: ARG002
        return 0
