"""A lease: ownership of one sequence's blocks, and of its slots in groups apart from the blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.kv.block_table import BlockTable
from engine.kv.blocks import Blocks
from engine.kv.prefix_index import BlockIdentity


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy block `source` to block `target`, and its slots likewise."""

    source: int
    target: int


class LeaseError(Exception):
    """Use of a released lease: an internal fault, never caused by a request."""


class BlockLease:
    """Ownership of one sequence's blocks, in block table order. Released exactly once."""

    __slots__ = (
        "_block_ids",
        "_blocks",
        "_first_held",
        "_is_live",
        "_last_key",
        "_own_end",
        "_own_start",
        "num_cached_tokens",
        "slots",
        "tenant",
        "whole_start",
    )

    def __init__(
        self,
        blocks: Blocks,
        block_ids: Iterable[int],
        num_indexed: int,
        last_key: bytes | None,
        whole_start: int,
        first_held: int,
        slots: tuple[set[int], ...],
        tenant: bytes,
    ) -> None:
        """num_indexed: leading blocks in the prefix index. last_key: chain key of the last of them,
        or of the tenant; None disables indexing. first_held: index of the first block that the
        lease holds. slots: by allocator, block table indices with slots. tenant: prefix key of the
        sequence."""
        self._blocks = blocks
        self._block_ids = BlockTable(block_ids, blocks.num_blocks)
        self.num_cached_tokens = num_indexed * blocks.size
        """Leading tokens with computed and indexed KV."""
        self.whole_start = whole_start
        """First token from which all groups have KV; groups that keep fewer may lack it before."""
        self._first_held = first_held
        self.slots = slots
        self.tenant = tenant
        self._last_key = last_key
        self._is_live = True
        # Tokens [own_start, own_end) lie in blocks that no other lease has. Most writes are within
        # this range and check no block. An empty range is always valid.
        self._own_start = self._own_end = 0
        blocks.leases[id(self)] = self

    @property
    def block_ids(self) -> BlockTable:
        """The block table, owned by the lease: callers must neither change nor keep it. Raises
        LeaseError after the release."""
        if not self._is_live:
            raise LeaseError("this lease was released already")
        return self._block_ids

    @property
    def held_block_ids(self) -> Sequence[int]:
        """Held blocks: the block table from `held_start` on. Raises LeaseError after the
        release."""
        return self.block_ids[self._first_held :] if self._first_held else self.block_ids

    @property
    def held_start(self) -> int:
        """First token that has a block; a multiple of the block size."""
        return self._first_held * self._blocks.size

    @property
    def num_tokens(self) -> int:
        """Capacity of the blocks, in tokens."""
        return len(self._block_ids) * self._blocks.size

    @property
    def num_exclusive_blocks(self) -> int:
        """Blocks that a release would make available."""
        references = self._blocks.references
        return sum(1 for block_id in self.held_block_ids if references[block_id] == 1)

    def num_blocks_to_write(self, start: int, end: int) -> int:
        """Blocks to allocate before tokens [start, end) can be written: missing ones, and copies of
        shared ones."""
        if self._own_start <= start and end <= self._own_end:
            return 0
        num_missing = self._blocks.num_for(end) - len(self._block_ids)
        return max(0, num_missing) + len(self.shared_indices(start, end))

    def prepare_write(self, start: int, end: int) -> tuple[BlockCopy, ...] | None:
        """Make tokens [start, end) writable; None, without changes, if no blocks are available now.

        The caller executes the returned copies before its write and before any write to their
        sources.
        """
        blocks, block_ids = self._blocks, self.block_ids
        if self._own_start <= start and end <= self._own_end:
            return ()
        shared_indices = self.shared_indices(start, end)
        num_missing = max(0, blocks.num_for(end) - len(block_ids))
        if num_missing + len(shared_indices) > blocks.num_available:
            return None
        places = range(start // blocks.size, blocks.num_for(end))
        if not self._has_slots_for(places, shared_indices):
            return None
        copies = []
        for index in shared_indices:
            shared = block_ids[index]
            blocks.references[shared] -= 1
            block_ids.replace(index, blocks.take())
            copies.append(BlockCopy(shared, block_ids[index]))
            for allocator, held in zip(blocks.allocators, self.slots, strict=True):
                allocator.on_copy(held, index, shared, block_ids[index])
        block_ids.extend(blocks.take() for _ in range(num_missing))
        self._write_slots(places)
        self._own_start, self._own_end = start, blocks.num_for(end) * blocks.size
        return tuple(copies)

    def fork(self, num_tokens: int) -> BlockLease:
        """A second lease of the blocks with the first `num_tokens` tokens. Allocates no block."""
        blocks = self._blocks
        block_ids = self.block_ids[: blocks.num_for(num_tokens)]
        for block_id in block_ids[self._first_held :]:
            blocks.references[block_id] += 1
        slots = tuple(
            allocator.fork(held, block_ids)
            for allocator, held in zip(blocks.allocators, self.slots, strict=True)
        )
        self._own_start = self._own_end = 0
        num_indexed = self.num_cached_tokens // blocks.size
        return BlockLease(
            *(blocks, block_ids, num_indexed, self._last_key, self.whole_start),
            *(self._first_held, slots, self.tenant),
        )

    def reserve(self, first_token: int, end_token: int) -> bool:
        """Hold blocks and slots for tokens [first_token, end_token); returns whether there is room
        now. Blocks before first_token are given back in any case, unless all are kept.

        first_token: 0 keeps the present range; else groups that keep fewer than all tokens must no
        longer need earlier ones.
        """
        blocks, block_ids = self._blocks, self.block_ids
        places = range(first_token // blocks.size, blocks.num_for(end_token))
        if not self._has_slots_for(places, ()):
            return False
        self._write_slots(places)
        if not blocks.gives_back:
            return True
        first = places.start
        self._give_back_before(first)
        num_missing = places.stop - max(first, len(block_ids))
        if num_missing > blocks.num_available:
            return False
        block_ids.extend(0 for _ in range(first - len(block_ids)))
        block_ids.extend(blocks.take() for _ in range(num_missing))
        return True

    def extend(self, end_token: int, max_num_blocks: int) -> None:
        """Hold blocks for tokens up to end_token, as far as max_num_blocks more are enough and
        available. For groups that keep all blocks."""
        blocks = self._blocks
        num_missing = blocks.num_for(end_token) - len(self.block_ids)
        num_new = min(num_missing, max_num_blocks, blocks.num_available)
        self._block_ids.extend(blocks.take() for _ in range(num_new))

    def slide(self, token_ids: Sequence[int], num_computed: int) -> None:
        """Mark the first `num_computed` tokens as computed for good: index them, and give back
        blocks or slots that no later token attends to."""
        blocks = self._blocks
        if not blocks.slides:
            return
        first = blocks.first_needed(num_computed // blocks.size)
        if blocks.gives_back:
            if first > self._first_held:
                self.index(token_ids, num_computed)
                self._give_back_before(first)
        elif first * blocks.size > self.whole_start:
            self.index(token_ids, num_computed)
            for allocator, held in zip(blocks.allocators, self.slots, strict=True):
                allocator.slide(held, self._block_ids, first)
            self.whole_start = first * blocks.size

    def _give_back_before(self, first: int) -> None:
        """Give back blocks before index `first`."""
        for block_id in self._block_ids[self._first_held : first]:
            self._blocks.give_back(block_id)
        self._first_held = max(self._first_held, first)
        self.whole_start = max(self.whole_start, self.held_start)

    def _has_slots_for(self, places: range, copied: Sequence[int]) -> bool:
        """Whether enough slots are available to write at these indices; `copied` are copied
        first."""
        for allocator, held in zip(self._blocks.allocators, self.slots, strict=True):
            num_needed = allocator.num_to_write(held, places, copied)
            if num_needed and num_needed > allocator.num_available:
                return False
        return True

    def _write_slots(self, places: range) -> None:
        for allocator, held in zip(self._blocks.allocators, self.slots, strict=True):
            allocator.on_write(held, self._block_ids, places)

    def received(self, whole_start: int) -> None:
        """KV of all uncached tokens arrived; all groups have it from whole_start on."""
        if whole_start > self.num_cached_tokens:
            self.whole_start = max(self.whole_start, whole_start)

    def shared_indices(self, start: int, end: int) -> list[int]:
        """Block table indices, within a write of tokens [start, end), of blocks shared with other
        leases."""
        blocks, references = self._blocks, self._blocks.references
        first, end_place = start // blocks.size, blocks.num_for(end)
        indices = list(range(first, min(end_place, len(self._block_ids))))
        indices[:0] = [place for place in blocks.written_places if place < first]
        return [index for index in indices if references[self._block_ids[index]] > 1]

    def index(self, token_ids: Sequence[int], num_computed: int) -> None:
        """Index the full blocks among the first `num_computed` tokens. Their KV must be
        complete."""
        block_ids, size = self.block_ids, self._blocks.size
        if self._last_key is None:
            return
        index = self._blocks.index
        for place in range(self.num_cached_tokens // size, num_computed // size):
            tokens = token_ids[place * size : (place + 1) * size]
            is_whole = place * size >= self.whole_start
            self.num_cached_tokens = (place + 1) * size
            identity = index.link(self.tenant, self._last_key, tokens)
            self._last_key = identity.key
            if self._blocks.gives_back and not is_whole:
                continue
            self._blocks.num_gains += 1
            replaced = index.add(identity, block_ids[place], is_whole)
            if replaced is not None:
                self._blocks.on_unindexed(replaced)
        # Indexed blocks may be shared from now on.
        self._own_start = max(self._own_start, self.num_cached_tokens)

    def unindexed(self, token_ids: Sequence[int]) -> Iterator[BlockIdentity]:
        """Identities of the full blocks of `token_ids` after the indexed ones, in order; none if
        nothing is indexed for this sequence."""
        size, parent = self._blocks.size, self._last_key
        if parent is None:
            return
        for end in range(self.num_cached_tokens + size, len(token_ids) + 1, size):
            tokens = token_ids[end - size : end]
            yield (identity := self._blocks.index.link(self.tenant, parent, tokens))
            parent = identity.key

    def release(self) -> None:
        """Give the blocks back, last first, so that eviction takes a prefix from its end. Raises
        LeaseError the second time."""
        blocks, held_block_ids = self._blocks, self.held_block_ids
        for allocator, held in zip(blocks.allocators, self.slots, strict=True):
            allocator.release(held, self._block_ids)
        for block_id in reversed(held_block_ids):
            blocks.give_back(block_id)
        del blocks.leases[id(self)]
        self._is_live = False
        self._block_ids = BlockTable((), blocks.num_blocks)

    def __enter__(self) -> BlockLease:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_live:
            self.release()
