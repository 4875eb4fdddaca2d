"""Index of full blocks by prefix: a chain of keyed hashes, one per block.

A block's key digests its tokens and the previous block's key, starting from a per-boot secret and
the tenant: equal keys mean equal prefixes, tenants are isolated, and keys cannot be predicted. A
hit also compares tokens, so a collision is a miss.

If some groups keep fewer than all tokens, a received block may lack their KV. It is indexed as
partial, and a prefix may end only where all blocks that these groups need next are whole. If all
groups keep fewer tokens, only those blocks are looked up.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from blake3 import blake3

from engine.kv.layout import LayerGroups


class BlockIdentity(NamedTuple):
    """Whose KV a full block has. key: chain key of its tokens and all before; parent: of those
    before; tokens: native 32-bit words; tenant: prefix key of the owner."""

    key: bytes
    parent: bytes
    tokens: bytes
    tenant: bytes


@dataclass(frozen=True, slots=True)
class PrefixBlock:
    """An indexed full block. is_whole: whether it has the KV of all groups."""

    identity: BlockIdentity
    block_id: int
    is_whole: bool


class Prefix(NamedTuple):
    """Blocks of a cached prefix, in order. last_key: chain key after the last of them, or of the
    tenant; None disables the lookup. first_whole: index of the first whole block; unless all blocks
    are kept, ids before it are meaningless."""

    block_ids: Sequence[int]
    last_key: bytes | None
    first_whole: int = 0


NO_PREFIX = Prefix((), None)


class PrefixIndex:
    """Maps chain keys to blocks and back, independent of ownership."""

    def __init__(self, block_size: int, secret: bytes, groups: LayerGroups) -> None:
        """secret: 32 random bytes per start."""
        self._block_size = block_size
        self._groups = groups
        self._secret = secret
        self._by_key: dict[bytes, PrefixBlock] = {}
        self.by_block: dict[int, PrefixBlock] = {}
        """Entries by block id; read by the pool."""

    def match(self, tenant: bytes, token_ids: Sequence[int], min_num_tokens: int = 0) -> Prefix:
        """The longest cached prefix of `token_ids` that a sequence can resume from; empty if
        shorter than min_num_tokens."""
        root = last_key = blake3(tenant, key=self._secret).digest()
        blocks: list[PrefixBlock | None] = []
        size = self._block_size
        for start in range(0, len(token_ids) - size + 1, size):
            wanted = self.link(tenant, last_key, token_ids[start : start + size])
            found = self._by_key.get(wanted.key)
            if found and found.identity != wanted:
                found = None
            if found is None and self._groups.keeps_all_blocks:
                break
            blocks.append(found)
            last_key = wanted.key
        num_blocks, first_whole = len(blocks), 0
        if self._groups.has_partial:
            num_blocks, first_whole = self._usable(blocks)
        last = blocks[num_blocks - 1] if num_blocks else None
        if last is None or num_blocks * size < min_num_tokens:
            return Prefix((), root)
        block_ids = [block.block_id if block else 0 for block in blocks[:num_blocks]]
        return Prefix(block_ids, last.identity.key, first_whole)

    def _usable(self, blocks: Sequence[PrefixBlock | None]) -> tuple[int, int]:
        """(number of blocks that a sequence can resume from, index of the first whole one)."""
        num_usable = first_usable = first_whole = 0
        for index, block in enumerate(blocks):
            if block is None or not block.is_whole:
                first_whole = index + 1
            needed = self._groups.kept_start((index + 1) * self._block_size)
            if block and first_whole * self._block_size <= needed:
                num_usable, first_usable = index + 1, first_whole
        return num_usable, first_usable

    def add(self, identity: BlockIdentity, block_id: int, is_whole: bool = True) -> int | None:
        """Index a full block, unless an equal block at least as whole is indexed. Returns the block
        that it replaces, if any."""
        before = self._by_key.get(identity.key)
        if before and (before.is_whole or not is_whole):
            return None
        block = PrefixBlock(identity, block_id, is_whole)
        self._by_key[identity.key] = self.by_block[block_id] = block
        if before is None:
            return None
        del self.by_block[before.block_id]
        return before.block_id

    def is_whole(self, block_id: int) -> bool:
        """Whether the block is indexed with the KV of all groups."""
        block = self.by_block.get(block_id)
        return block is not None and block.is_whole

    def set_partial(self, block_id: int) -> None:
        """Mark the block, if indexed, as lacking the KV of a group."""
        block = self.by_block.get(block_id)
        if block is not None:
            partial = replace(block, is_whole=False)
            self._by_key[block.identity.key] = self.by_block[block_id] = partial

    def remove(self, block_id: int) -> None:
        """Remove a block that is about to be overwritten."""
        block = self.by_block.pop(block_id)
        del self._by_key[block.identity.key]

    def link(self, tenant: bytes, parent: bytes, token_ids: Sequence[int]) -> BlockIdentity:
        """Identity of the block with `token_ids` after the prefix with key `parent`."""
        tokens = array("I", token_ids).tobytes()
        key = blake3(parent + tokens, key=self._secret).digest()
        return BlockIdentity(key, parent, tokens, tenant)
