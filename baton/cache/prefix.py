"""Which full blocks hold which prefix: a chain of keyed hashes, one link per block.

The key of a block digests its tokens and the key of the block before it, under a secret of this
boot and the tenant, so that equal keys mean equal prefixes, tenants never meet, and nobody outside
can predict a key. Tokens are compared on a hit all the same: a collision costs a miss, never a
wrong answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3


@dataclass(frozen=True, slots=True)
class PrefixBlock:
    """A full block in the index."""

    key: bytes
    parent: bytes
    tokens: bytes
    block_id: int


class PrefixIndex:
    """Maps chain keys to blocks and back. Knows nothing of who owns a block."""

    def __init__(self, block_size: int, secret: bytes) -> None:
        """`secret`: 32 bytes, drawn at start."""
        self._block_size = block_size
        self._secret = secret
        self._by_key: dict[bytes, PrefixBlock] = {}
        self._by_block: dict[int, PrefixBlock] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def root(self, tenant: bytes) -> bytes:
        """The key that the chains of a tenant start from."""
        return blake3(tenant, key=self._secret).digest()

    def link(self, parent: bytes, tokens: bytes) -> bytes:
        """The key of the block that holds `tokens` after the prefix of key `parent`."""
        return blake3(parent + tokens, key=self._secret).digest()

    def match(self, tenant: bytes, token_ids: Sequence[int]) -> Iterator[PrefixBlock]:
        """The indexed blocks that hold the longest known prefix of `token_ids`, in order."""
        key = self.root(tenant)
        for start in range(0, len(token_ids) - self._block_size + 1, self._block_size):
            tokens = token_bytes(token_ids[start : start + self._block_size])
            parent, key = key, self.link(key, tokens)
            found = self._by_key.get(key)
            if found is None or found.tokens != tokens or found.parent != parent:
                return
            yield found

    def add(self, block: PrefixBlock) -> bool:
        """Index a block; False if its prefix is indexed already, under another block."""
        if block.key in self._by_key:
            return False
        self._by_key[block.key] = block
        self._by_block[block.block_id] = block
        return True

    def remove(self, block_id: int) -> None:
        """Forget a block that is about to hold something else."""
        block = self._by_block.pop(block_id)
        del self._by_key[block.key]


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as native 32-bit words, for hashing and comparing."""
    return array("I", token_ids).tobytes()
