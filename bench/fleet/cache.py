"""KV blocks of a simulated worker, and its cached prefixes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from baton.types import BlockCounts


class Blocks:
    """Blocks that sequences hold; in the rest, the latest named pieces of prompts.

    A piece that several sequences share is charged to each of them.
    """

    def __init__(self, num_blocks: int, block_size: int, piece_tokens: int) -> None:
        """piece_tokens: of each name; a multiple of block_size."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self._piece_tokens = piece_tokens
        self._piece_blocks = piece_tokens // block_size
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pieces that no sequence holds, latest last."""
        self._held: Counter[int] = Counter()
        self.num_leased = 0

    @property
    def num_available(self) -> int:
        return self.num_blocks - self.num_leased

    def counts(self) -> BlockCounts:
        cached = min(len(self._idle) * self._piece_blocks, self.num_available)
        return BlockCounts(self.num_available - cached, cached, self.num_leased)

    def num_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def matched_tokens(self, names: Sequence[int], num_tokens: int) -> int:
        """Leading tokens that are cached; the last token is always computed."""
        num_pieces = 0
        for name in names:
            if name not in self._idle and name not in self._held:
                break
            num_pieces += 1
        matched = min(num_pieces * self._piece_tokens, num_tokens - 1)
        return matched // self.block_size * self.block_size

    def lease(self, number: int) -> None:
        self.num_leased += number
        most = max(0, self.num_available) // self._piece_blocks
        while len(self._idle) > most:
            self._idle.popitem(last=False)

    def hold(self, names: Sequence[int]) -> None:
        """A sequence has the KV of these pieces."""
        for name in names:
            self._held[name] += 1
            self._idle.pop(name, None)

    def release(self, number: int, names: Sequence[int]) -> None:
        """A sequence gives its blocks back; its pieces stay cached while there is room."""
        self.num_leased -= number
        for name in reversed(names):  # the beginning is what others share: it goes last
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]
                self._idle[name] = None
        self.lease(0)
