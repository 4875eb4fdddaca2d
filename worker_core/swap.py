"""Host memory that the KV of preempted sequences waits in: the handoff's pack and unpack, with a
local destination."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from baton.engine.interface import KvPool
from baton.types import KvRange


@dataclass(frozen=True, slots=True)
class _Swapped:
    """blocks: packed bytes, block by block; the last may be shorter."""

    blocks: tuple[bytearray, ...]
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.blocks))


class SwapSpace:
    """KV by the key of its sequence. Used by the engine loop's thread only."""

    def __init__(self, kv: KvPool, max_num_bytes: int) -> None:
        self._kv = kv
        self._max_num_bytes = max_num_bytes
        self._swapped: dict[Hashable, _Swapped] = {}
        self.num_bytes = 0
        self.num_swaps = 0

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is swapped out."""
        return not self._swapped

    def num_bytes_of(self, num_tokens: int) -> int:
        """Bytes that the KV of `num_tokens` tokens takes here."""
        return num_tokens * self._kv.layout.token_bytes

    def has_room_for(self, num_tokens: int) -> bool:
        return self.num_bytes + self.num_bytes_of(num_tokens) <= self._max_num_bytes

    def put(self, key: Hashable, block_ids: Sequence[int], num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of a block table. There must be room; the
        key must be new."""
        layout = self._kv.layout
        blocks = []
        for first in range(0, num_tokens, layout.block_size):
            piece = self._piece(first, num_tokens)
            block = bytearray(piece.num_tokens * layout.token_bytes)
            self._kv.pack(block_ids, piece, memoryview(block))
            blocks.append(block)
        swapped = _Swapped(tuple(blocks), num_tokens)
        self._swapped[key] = swapped
        self.num_bytes += swapped.num_bytes
        self.num_swaps += 1

    def take(self, key: Hashable, block_ids: Sequence[int], num_held_tokens: int) -> None:
        """Copy the KV back, but for the first `num_held_tokens` tokens, whole blocks that are
        there; then forget it."""
        layout = self._kv.layout
        swapped = self._swapped[key]
        num_held = num_held_tokens // layout.block_size
        for index, block in enumerate(swapped.blocks[num_held:], start=num_held):
            piece = self._piece(index * layout.block_size, swapped.num_tokens)
            self._kv.unpack(block_ids, piece, memoryview(block))
        self.drop(key)

    def drop(self, key: Hashable) -> None:
        """Forget what is here of a sequence."""
        self.num_bytes -= self._swapped.pop(key).num_bytes

    def _piece(self, first_token: int, end_token: int) -> KvRange:
        """What the block that begins at `first_token` holds of a sequence's KV."""
        layout = self._kv.layout
        num_tokens = min(layout.block_size, end_token - first_token)
        return KvRange(first_token, num_tokens, 0, layout.num_layers)
