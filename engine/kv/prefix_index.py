"""Which full blocks hold which prefix, known by a chain of keyed hashes, one link per block.

The key of a block digests its tokens and the key of the block before it, under a secret of this
boot and the tenant, so that equal keys mean equal prefixes, tenants never meet, and nobody outside
can predict a key. Tokens are compared on a hit all the same: a collision costs a miss, never a
wrong answer.

If groups of layers keep fewer than all tokens, a block that came from elsewhere may lack their KV.
It is found, too, but a prefix ends only where all blocks that these groups need from its end on are
whole. If all groups keep fewer, a prefix is found by these blocks alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from blake3 import blake3

from engine.kv.layout import LayerGroups


@dataclass(frozen=True, slots=True)
class PrefixBlock:
    """A full block in the index. is_whole: whether it has the KV of all groups."""

    key: bytes
    parent: bytes
    tokens: bytes
    block_id: int
    is_whole: bool


class Prefix(NamedTuple):
    """Blocks that hold a prefix, in order. last_key: what the chain goes on from, the key of the
    last of them or of the tenant; None if nothing is looked for. first_whole: blocks from this one
    on are whole; unless all blocks are kept, those before it need not be there, and their ids mean
    nothing."""

    block_ids: Sequence[int]
    last_key: bytes | None
    first_whole: int = 0


NO_PREFIX = Prefix((), None)


class PrefixIndex:
    """Maps chain keys to blocks and back. Knows nothing of who owns a block."""

    def __init__(self, block_size: int, secret: bytes, groups: LayerGroups) -> None:
        """secret: 32 bytes, drawn at start."""
        self._block_size = block_size
        self._groups = groups
        self._secret = secret
        self._by_key: dict[bytes, PrefixBlock] = {}
        self.by_block: dict[int, PrefixBlock] = {}
        """By block id. Read by the pool."""

    def match(self, tenant: bytes, token_ids: Sequence[int], min_num_tokens: int = 0) -> Prefix:
        """The longest known prefix of `token_ids` that a sequence can go on from; none if it is
        shorter than min_num_tokens."""
        root = last_key = blake3(tenant, key=self._secret).digest()
        blocks: list[PrefixBlock | None] = []
        size = self._block_size
        for start in range(0, len(token_ids) - size + 1, size):
            key, tokens = self.link(last_key, token_ids[start : start + size])
            found = self._by_key.get(key)
            if found and (found.tokens != tokens or found.parent != last_key):
                found = None
            if found is None and self._groups.keeps_all_blocks:
                break
            blocks.append(found)
            last_key = key
        num_blocks, first_whole = len(blocks), 0
        if self._groups.has_partial:
            num_blocks, first_whole = self._usable(blocks)
        last = blocks[num_blocks - 1] if num_blocks else None
        if last is None or num_blocks * size < min_num_tokens:
            return Prefix((), root)
        block_ids = [block.block_id if block else 0 for block in blocks[:num_blocks]]
        return Prefix(block_ids, last.key, first_whole)

    def _usable(self, blocks: Sequence[PrefixBlock | None]) -> tuple[int, int]:
        """How many of a prefix's blocks a sequence can go on from, and from which on they are
        whole."""
        num_usable = first_usable = first_whole = 0
        for index, block in enumerate(blocks):
            if block is None or not block.is_whole:
                first_whole = index + 1
            needed = self._groups.kept_start((index + 1) * self._block_size)
            if block and first_whole * self._block_size <= needed:
                num_usable, first_usable = index + 1, first_whole
        return num_usable, first_usable

    def add(
        self, parent: bytes, token_ids: Sequence[int], block_id: int, is_whole: bool = True
    ) -> tuple[bytes, int | None]:
        """Index a full block behind the prefix of key `parent`, unless another one is already that
        is no less whole. Returns its key, and the block that it takes the place of, if any."""
        key, tokens = self.link(parent, token_ids)
        before = self._by_key.get(key)
        if before and (before.is_whole or not is_whole):
            return key, None
        block = PrefixBlock(key, parent, tokens, block_id, is_whole)
        self._by_key[key] = self.by_block[block_id] = block
        if before is None:
            return key, None
        del self.by_block[before.block_id]
        return key, before.block_id

    def is_whole(self, block_id: int) -> bool:
        """Whether the block is indexed with the KV of all groups."""
        block = self.by_block.get(block_id)
        return block is not None and block.is_whole

    def set_partial(self, block_id: int) -> None:
        """A block, if it is indexed, has lost the KV of a group."""
        block = self.by_block.get(block_id)
        if block is not None:
            partial = replace(block, is_whole=False)
            self._by_key[block.key] = self.by_block[block_id] = partial

    def remove(self, block_id: int) -> None:
        """Forget a block that is about to hold something else."""
        block = self.by_block.pop(block_id)
        del self._by_key[block.key]

    def link(self, parent: bytes, token_ids: Sequence[int]) -> tuple[bytes, bytes]:
        """The key of the block that holds `token_ids` after the prefix of key `parent`, and the ids
        as native 32-bit words, as they are hashed and compared."""
        tokens = array("I", token_ids).tobytes()
        return blake3(parent + tokens, key=self._secret).digest(), tokens
