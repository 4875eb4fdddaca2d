"""The block pool: each KV block of a worker is free, cached or leased, and each lease has exactly
one owner.

        take                     release, prefix not indexed
free ─────────▶ leased ──────────────────────────────────────▶ free
                 ▲   │ release, prefix indexed
    prefix hit   │   ▼
                 cached ─── evicted, least recently used first ─▶ leased by the taker

Several leases may share a block of a cached or forked prefix. It stays leased until the last of
them is released, and is not written while shared: `prepare_write` copies it for the writer first
(copy-on-write). One thread, the engine loop's, uses a pool.

The pool does not distinguish kinds of layers. Groups with KV apart from the blocks have allocators
(engine/kv/groups), which it notifies of each event of leases and blocks. If no group keeps all
tokens, a lease holds only the end of its block table: earlier blocks were given back as the
sequence grew (`slide`), or never allocated (`reserve`). Their table entries are meaningless and
must not be read or written through. Blocks that were given back stay cached.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from baton.types import BlockCounts
from engine.kv.blocks import Blocks
from engine.kv.groups.group import GroupAllocator, raise_faults
from engine.kv.layout import LayerGroups
from engine.kv.lease import BlockLease
from engine.kv.prefix_index import NO_PREFIX, PrefixBlock


class BlockPool:
    """All blocks of one worker."""

    def __init__(
        self,
        num_blocks: int,
        groups: LayerGroups,
        *,
        secret: bytes,
        allocators: Sequence[GroupAllocator] = (),
        enable_prefix_caching: bool = True,
    ) -> None:
        """groups: of the KV in the blocks. secret: 32 random bytes per start. allocators: of all
        groups apart from the blocks. Raises ValueError for prefix caching with layers that cannot
        resume from a prefix, or if blocks that every step writes would be given back."""
        if groups.cannot_rewind and enable_prefix_caching:
            raise ValueError(f"sequences share no prefix: {groups.cannot_rewind}")
        self.num_blocks = num_blocks
        self.block_size = groups.layout.block_size
        self._blocks = Blocks(num_blocks, groups, secret, allocators)
        if self._blocks.gives_back and self._blocks.written_places:
            raise ValueError("blocks that every step writes, as first blocks, cannot be given back")
        self._indexes_prefixes = enable_prefix_caching

    def counts(self) -> BlockCounts:
        free, cached = len(self._blocks.free), len(self._blocks.cached)
        return BlockCounts(free=free, cached=cached, leased=self.num_blocks - free - cached)

    def slot_counts(self) -> BlockCounts:
        """Slots of all groups apart from the blocks, by state."""
        counts = [allocator.counts() for allocator in self._blocks.allocators]
        return BlockCounts(
            *(sum(getattr(each, name) for each in counts) for name in ("free", "cached", "leased"))
        )

    @property
    def num_available(self) -> int:
        """Blocks available now: free ones, and cached ones that can be evicted."""
        return self._blocks.num_available

    @property
    def room(self) -> tuple[int, ...]:
        """A sequence that found no room finds none until this changes."""
        blocks = self._blocks
        return blocks.num_gains, *(each.num_available for each in blocks.allocators)

    @property
    def num_copied_blocks(self) -> int:
        """Maximum blocks that a fork copies before its first write: the last one, and those that
        every step writes."""
        return 1 + len(self._blocks.written_places)

    @property
    def num_leases(self) -> int:
        """Number of unreleased leases."""
        return len(self._blocks.leases)

    @property
    def free_block_ids(self) -> tuple[int, ...]:
        return tuple(self._blocks.free)

    @property
    def cached_block_ids(self) -> tuple[int, ...]:
        """Cached blocks, least recently used first."""
        return tuple(self._blocks.cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        return self._blocks.num_for(num_tokens)

    def num_cached_tokens(self, tenant: bytes, token_ids: Sequence[int]) -> int:
        """Leading tokens that a lease would find computed; never includes the last token."""
        if not self._indexes_prefixes:
            return 0
        shared = self._blocks.index.match(tenant, token_ids[:-1])
        return len(shared.block_ids) * self.block_size

    def lease(
        self,
        tenant: bytes,
        token_ids: Sequence[int],
        num_tokens: int,
        *,
        shares_prefixes: bool = True,
        min_prefix_tokens: int = 0,
    ) -> BlockLease | None:
        """Lease blocks for `num_tokens` tokens, beginning with `token_ids`; None if there is no
        room now.

        Blocks of a cached prefix are shared, even beyond `num_tokens`; without groups that keep all
        tokens, only those still needed. The last of `token_ids` is never counted as cached, because
        its logits are needed. shares_prefixes: False for KV that is valid only in its own sequence.
        min_prefix_tokens: shorter prefixes are ignored.
        """
        blocks, found = self._blocks, NO_PREFIX
        if shares_prefixes and self._indexes_prefixes:
            found = self._blocks.index.match(tenant, token_ids[:-1], min_prefix_tokens)
        block_ids = list(found.block_ids)
        num_shared = len(block_ids)
        first_whole = found.first_whole
        if blocks.slides:
            first_whole = max(first_whole, blocks.first_needed(num_shared))
        first = first_whole if blocks.gives_back else 0
        num_fresh = max(0, self.num_blocks_for(num_tokens) - num_shared)
        held = block_ids[first:]
        num_revived = sum(1 for block_id in held if blocks.references[block_id] == 0)
        if num_fresh + num_revived > self.num_available:
            return None
        if any(each.num_at_start > each.num_available for each in self._blocks.allocators):
            return None
        for block_id in held:
            blocks.hold(block_id)
        block_ids.extend(blocks.take() for _ in range(num_fresh))
        places = range(first_whole, num_shared)
        slots = tuple(allocator.begin(block_ids, places) for allocator in self._blocks.allocators)
        whole_start = first_whole * self.block_size
        return BlockLease(
            *(blocks, block_ids, num_shared, found.last_key, whole_start, first, slots, tenant)
        )

    def num_exclusive_blocks(self, leases: Sequence[BlockLease]) -> int:
        """Blocks that become available if all of `leases` are released."""
        held = Counter(block_id for lease in leases for block_id in lease.held_block_ids)
        references = self._blocks.references
        return sum(references[block_id] == count for block_id, count in held.items())

    def num_blocks_to_write(self, leases: Sequence[BlockLease], start: int, end: int) -> int:
        """Blocks to allocate in total if each of `leases` writes tokens [start, end)."""
        num_blocks = sum(lease.num_blocks_to_write(start, end) for lease in leases)
        shared = Counter(
            lease.block_ids[index] for lease in leases for index in lease.shared_indices(start, end)
        )
        # The last writer of an otherwise unshared block keeps it.
        references = self._blocks.references
        num_kept = sum(references[block_id] == count for block_id, count in shared.items())
        return num_blocks - num_kept

    # Blocks to save before they are evicted

    def watch_cached(self) -> None:
        """Record which cached blocks have not been returned by take_unsaved yet."""
        self._blocks.unsaved = OrderedDict()

    def take_unsaved(self, max_num_blocks: int) -> list[PrefixBlock]:
        """The cached blocks that are evicted next, of those not returned before. A block that is
        used again, and then cached, is returned again."""
        unsaved, taken = self._blocks.unsaved, list[PrefixBlock]()
        while unsaved and len(taken) < max_num_blocks:
            block_id, _ = unsaved.popitem(last=False)
            taken.append(self._blocks.index.by_block[block_id])
        return taken

    def is_indexed(self, block: PrefixBlock) -> bool:
        """Whether the block has held this KV without interruption since `block` was returned. May
        be called from another thread: a block leaves the index before it is written."""
        return self._blocks.index.by_block.get(block.block_id) is block

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block is in exactly one state and reference counts match
        the leases."""
        expected = [0] * self.num_blocks
        for lease in self._blocks.leases.values():
            for block_id in lease.held_block_ids:
                expected[block_id] += 1
        free, cached = set(self._blocks.free), set(self._blocks.cached)
        leased = {block_id for block_id, count in enumerate(expected) if count}
        indexed = self._blocks.index.by_block.keys()
        raise_faults(
            {
                "reference counts differ from the leases": expected != self._blocks.references,
                "a block is free twice": len(free) != len(self._blocks.free),
                "a block is in two states": bool(free & cached or free & leased or cached & leased),
                "a block is lost": len(free | cached | leased) != self.num_blocks,
                "a free block is indexed": not free.isdisjoint(indexed),
                "a cached block is not indexed": not cached <= indexed,
                "a block to save is not cached": not cached.issuperset(self._blocks.unsaved or ()),
            }
        )
        whole = {block.block_id for block in self._blocks.index.by_block.values() if block.is_whole}
        for at, allocator in enumerate(self._blocks.allocators):
            held = [(lease.block_ids, lease.slots[at]) for lease in self._blocks.leases.values()]
            allocator.check_integrity(held, whole)
