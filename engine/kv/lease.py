"""A lease: ownership of one sequence's blocks, and of its slots in groups that lie apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.kv.block_table import BlockTable
from engine.kv.blocks import Blocks


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Block `target` is to hold what block `source` holds, and its slots what the slots of `source`
    hold."""

    source: int
    target: int


class LeaseError(Exception):
    """A lease was used after it had been released: a fault of ours, never of a request."""


class BlockLease:
    """Ownership of the blocks of one sequence, in the order of its block table. Given back exactly
    once."""

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
    ) -> None:
        """num_indexed: leading blocks that others can find. last_key: of the last of them, or of
        the tenant; None if nothing of this lease is ever to be found. first_held: place of the
        first block that is this lease's. slots: by allocator, the places that it holds slots at."""
        self._blocks = blocks
        self._block_ids = BlockTable(block_ids, blocks.num_blocks)
        self.num_cached_tokens = num_indexed * blocks.size
        """Leading tokens whose KV is computed and indexed."""
        self.whole_start = whole_start
        """Before this token, groups that keep fewer than all tokens may have no KV."""
        self._first_held = first_held
        self.slots = slots
        self._last_key = last_key
        self._is_live = True
        # Tokens [own_start, own_end) are known to lie in blocks that no other lease has. Most steps
        # write within this range, and then look at no block. An empty range claims nothing.
        self._own_start = self._own_end = 0
        blocks.leases[id(self)] = self

    @property
    def block_ids(self) -> BlockTable:
        """The block table. Borrowed: it grows with the lease and must not be changed or kept.
        Raises LeaseError after the release."""
        if not self._is_live:
            raise LeaseError("this lease was released already")
        return self._block_ids

    @property
    def held_block_ids(self) -> Sequence[int]:
        """The blocks that are this lease's: all of the block table, or those from `held_start` on.
        Raises LeaseError after the release."""
        return self.block_ids[self._first_held :] if self._first_held else self.block_ids

    @property
    def held_start(self) -> int:
        """The first token that has a block; a multiple of the block size."""
        return self._first_held * self._blocks.size

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks have room for."""
        return len(self._block_ids) * self._blocks.size

    @property
    def num_exclusive_blocks(self) -> int:
        """Blocks that a release would make available."""
        references = self._blocks.references
        return sum(1 for block_id in self.held_block_ids if references[block_id] == 1)

    def num_blocks_to_write(self, start: int, end: int) -> int:
        """Blocks that writing tokens [start, end) takes from the pool: missing ones, and own copies
        of shared ones."""
        if self._own_start <= start and end <= self._own_end:
            return 0
        num_missing = self._blocks.num_for(end) - len(self._block_ids)
        return max(0, num_missing) + len(self.shared_indices(start, end))

    def prepare_write(self, start: int, end: int) -> tuple[BlockCopy, ...] | None:
        """Make tokens [start, end) writable; None, and nothing changed, if there is no room now.

        The caller makes the copies returned before it writes, and before anyone else writes their
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
        """Another lease of the blocks that hold the first `num_tokens` tokens. Takes no block."""
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
            *(self._first_held, slots),
        )

    def reserve(self, first_token: int, end_token: int) -> bool:
        """Hold, of tokens before end_token, blocks and slots of those from first_token on; whether
        there is room now. Blocks before first_token are given back in any case, unless all are
        kept. first_token: 0 for all that is held already; else no token before it may be needed any
        more in groups that keep fewer than all."""
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

    def slide(self, token_ids: Sequence[int], num_computed: int) -> None:
        """The first `num_computed` tokens are computed, and will not be computed again: let others
        find them, and give back the blocks, or the slots, that no later token attends to."""
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
        """Hold blocks from place `first` on only."""
        for block_id in self._block_ids[self._first_held : first]:
            self._blocks.give_back(block_id)
        self._first_held = max(self._first_held, first)
        self.whole_start = max(self.whole_start, self.held_start)

    def _has_slots_for(self, places: range, copied: Sequence[int]) -> bool:
        """Whether writing these places, those `copied` after a copy, finds slots enough."""
        for allocator, held in zip(self._blocks.allocators, self.slots, strict=True):
            num_needed = allocator.num_to_write(held, places, copied)
            if num_needed and num_needed > allocator.num_available:
                return False
        return True

    def _write_slots(self, places: range) -> None:
        for allocator, held in zip(self._blocks.allocators, self.slots, strict=True):
            allocator.on_write(held, self._block_ids, places)

    def received(self, whole_start: int) -> None:
        """KV came for what was not cached; in every group from whole_start on."""
        if whole_start > self.num_cached_tokens:
            self.whole_start = max(self.whole_start, whole_start)

    def shared_indices(self, start: int, end: int) -> list[int]:
        """Places in the block table, among those that writing tokens [start, end) writes to, of
        blocks that others hold too."""
        blocks, references = self._blocks, self._blocks.references
        first, end_place = start // blocks.size, blocks.num_for(end)
        indices = list(range(first, min(end_place, len(self._block_ids))))
        indices[:0] = [place for place in blocks.written_places if place < first]
        return [index for index in indices if references[self._block_ids[index]] > 1]

    def index(self, token_ids: Sequence[int], num_computed: int) -> None:
        """Let others find the full blocks among the first `num_computed` tokens, whose KV must be
        complete."""
        block_ids, size = self.block_ids, self._blocks.size
        if self._last_key is None:
            return
        index = self._blocks.index
        for place in range(self.num_cached_tokens // size, num_computed // size):
            tokens = token_ids[place * size : (place + 1) * size]
            is_whole = place * size >= self.whole_start
            self.num_cached_tokens = (place + 1) * size
            if self._blocks.gives_back and not is_whole:
                self._last_key, _ = index.link(self._last_key, tokens)
                continue
            self._last_key, replaced = index.add(self._last_key, tokens, block_ids[place], is_whole)
            if replaced is not None:
                self._blocks.on_unindexed(replaced)
        # Others may take what is indexed from now on.
        self._own_start = max(self._own_start, self.num_cached_tokens)

    def release(self) -> None:
        """Give the blocks back: tails first, so that eviction takes the end of a prefix before its
        beginning. Raises LeaseError the second time."""
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
