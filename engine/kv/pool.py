"""The block pool: every KV block of a worker is free, cached or leased, and a lease is owned
exactly once.

        take                     release, prefix not indexed
free ─────────▶ leased ──────────────────────────────────────▶ free
                 ▲   │ release, prefix indexed
    prefix hit   │   ▼
                 cached ─── evicted, least recently used first ─▶ leased by the taker

A block may appear in several leases: as part of a common prefix that was found, or of one that was
forked. It stays leased until the last of them is released, and nobody writes it while it is shared:
`prepare_write` gives the writer a block of its own first (copy-on-write). One thread, the engine
loop's, uses a pool.

Which full blocks hold which prefix is known by a chain of keyed hashes, one link per block. The key
of a block digests its tokens and the key of the block before it, under a secret of this boot and
the tenant, so that equal keys mean equal prefixes, tenants never meet, and nobody outside can
predict a key. Tokens are compared on a hit all the same: a collision costs a miss, never a wrong
answer.

Of a model with windowed layers, a block that came from elsewhere may lack their KV: only the window
is sent. Such a block is found, too, but a prefix ends only where all blocks that the window reaches
from its end are whole.

Of a model whose layers are all windowed, a lease holds the blocks from some place on: those before
it were given back as the sequence grew (`slide`), or never taken (`reserve`). Their entries in the
block table are of no meaning: nothing may read or write what they name. Blocks that were given back
stay cached, and a prefix is found by the blocks of its window alone.

Of a model with layers of both kinds, the KV of windowed layers may lie apart, in slots
(`window_slots.py`): then a lease holds all its blocks, and slots from some place on. A block whose
slot went to another one is indexed, but not as whole.

Of a model that has layers with a state, a sequence's states lie in the slot of its first block
(`state_slots.py`), which every step writes. No prefix is found: it could not be gone on from.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

from blake3 import blake3

from baton.types import BlockCounts
from engine.kv.groups.state import StateSlots
from engine.kv.groups.window import WindowSlots


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Block `target` is to hold what block `source` holds; of windowed layers whose KV lies apart,
    and of states, if the source has a slot."""

    source: int
    target: int


class LeaseError(Exception):
    """A lease was used after it had been released: a fault of ours, never of a request."""


class BlockPool:
    """All blocks of one worker."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        secret: bytes,
        enable_prefix_caching: bool = True,
        window: int = 0,
        has_full_layers: bool = True,
        window_slots: WindowSlots | None = None,
        state_slots: StateSlots | None = None,
    ) -> None:
        """window, has_full_layers: see KvLayout. window_slots, state_slots: those of the engine's
        pool, of which this one has all; None where blocks have the KV of all layers, and where no
        layer has a state. Raises ValueError if prefixes would be found of a model with states, or
        its sequences give their first blocks back."""
        if state_slots and (enable_prefix_caching or not has_full_layers):
            raise ValueError("sequences with a state share no prefix, and keep their first blocks")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._window = window if window_slots or not has_full_layers else 0
        """Tokens whose KV in windowed layers a sequence goes on from; 0 if it holds that of all."""
        self._slots = window_slots
        self._states = state_slots
        self._gives_blocks_back = self._window > 0 and window_slots is None
        """Whether blocks behind the window go back; else they stay, and slots go back if there are
        any."""
        self._index = PrefixIndex(block_size, secret, window, has_full_layers)
        self._indexes_prefixes = enable_prefix_caching
        self._leases: dict[int, BlockLease] = {}

    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free=free, cached=cached, leased=self.num_blocks - free - cached)

    def slot_counts(self) -> BlockCounts:
        """Of window slots; none where blocks have the KV of all layers."""
        return self._slots.counts() if self._slots else BlockCounts(0, 0, 0)

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones, and cached ones that are given up."""
        return len(self._free) + len(self._cached)

    @property
    def num_leases(self) -> int:
        """Leases that have not been released."""
        return len(self._leases)

    @property
    def free_block_ids(self) -> tuple[int, ...]:
        return tuple(self._free)

    @property
    def cached_block_ids(self) -> tuple[int, ...]:
        """Least recently used first."""
        return tuple(self._cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_cached_tokens(self, tenant: bytes, token_ids: Sequence[int]) -> int:
        """Leading tokens of a sequence that a lease of it would find computed; the last token never
        counts."""
        if not self._indexes_prefixes:
            return 0
        shared = self._index.match(tenant, token_ids[:-1])
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
        """Blocks for `num_tokens` tokens that begin with `token_ids`; None if there is no room now.

        Blocks that hold a known prefix are shared, also if they are more than `num_tokens` take; of
        a model without full layers those of its window. At least the last of `token_ids` is left to
        compute, because its logits are needed. shares_prefixes: False for KV that means nothing
        outside its own sequence. min_prefix_tokens: a shorter prefix counts as none.
        """
        found = _NO_PREFIX
        if shares_prefixes and self._indexes_prefixes:
            found = self._index.match(tenant, token_ids[:-1], min_prefix_tokens)
        block_ids = list(found.block_ids)
        num_shared = len(block_ids)
        first_whole = found.first_whole
        if self._window:
            first_whole = max(first_whole, self._first_needed(num_shared))
        first = first_whole if self._gives_blocks_back else 0
        num_fresh = max(0, self.num_blocks_for(num_tokens) - num_shared)
        held = block_ids[first:]
        num_revived = sum(1 for block_id in held if self._references[block_id] == 0)
        if num_fresh + num_revived > self.num_available:
            return None
        if self._states and not self._states.num_available:
            return None
        for block_id in held:
            self._cached.pop(block_id, None)
            self._references[block_id] += 1
        block_ids.extend(self._take() for _ in range(num_fresh))
        if self._states:
            self._states.take(block_ids[0])
        places = range(first_whole, num_shared) if self._slots else range(0)
        if self._slots:
            for place in places:
                self._slots.hold(block_ids[place])
        window_start = first_whole * self.block_size
        return BlockLease(self, block_ids, num_shared, found.last_key, window_start, first, places)

    def num_exclusive_blocks(self, leases: Sequence[BlockLease]) -> int:
        """Blocks that releasing all of `leases` would make available."""
        held = Counter(block_id for lease in leases for block_id in lease.held_block_ids)
        return sum(self._references[block_id] == count for block_id, count in held.items())

    def num_blocks_to_write(self, leases: Sequence[BlockLease], start: int, end: int) -> int:
        """Blocks that it takes in all if each of `leases` writes tokens [start, end)."""
        num_blocks = sum(lease.num_blocks_to_write(start, end) for lease in leases)
        shared = Counter(
            lease.block_ids[index]
            for lease in leases
            for index in lease._shared_indices(start, end)
        )
        # Of those that share a block with nobody else, the last to write keeps it.
        num_kept = sum(self._references[block_id] == count for block_id, count in shared.items())
        return num_blocks - num_kept

    def check_integrity(self) -> None:
        """Raises AssertionError unless each block is in exactly one state and reference counts
        match the leases."""
        expected = [0] * self.num_blocks
        for lease in self._leases.values():
            for block_id in lease.held_block_ids:
                expected[block_id] += 1
        free, cached = set(self._free), set(self._cached)
        leased = {block_id for block_id, count in enumerate(expected) if count}
        indexed = self._index.by_block.keys()
        faults = {
            "reference counts differ from the leases": expected != self._references,
            "a block is free twice": len(free) != len(self._free),
            "a block is in two states": bool(free & cached or free & leased or cached & leased),
            "a block is lost": len(free | cached | leased) != self.num_blocks,
            "a free block is indexed": not free.isdisjoint(indexed),
            "a cached block is not indexed": not cached <= indexed,
        }
        found = [fault for fault, is_there in faults.items() if is_there]
        if found:
            raise AssertionError("; ".join(found))
        if self._slots:
            held = [
                lease._block_ids[place]
                for lease in self._leases.values()
                for place in lease._places
            ]
            whole = {block.block_id for block in self._index.by_block.values() if block.is_whole}
            self._slots.check_integrity(held, whole)
        if self._states:
            self._states.check_integrity(lease._block_ids[0] for lease in self._leases.values())

    def _take(self) -> int:
        if self._free:
            block_id = self._free.popleft()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._index.remove(block_id)
            if self._slots:
                self._slots.drop(block_id)
        self._references[block_id] = 1
        return block_id

    def _take_slot(self, block_id: int) -> None:
        """Of those that are available."""
        if self._slots and (loser := self._slots.take(block_id)) is not None:
            self._index.lose_window(loser)

    def _give_slot_back(self, block_id: int) -> None:
        if self._slots:
            block = self._index.by_block.get(block_id)
            self._slots.give_back(block_id, is_whole=block is not None and block.is_whole)

    def _own_slot(self, shared: int, own: int) -> None:
        """A lease goes on in block `own`, a copy of `shared`, whose slot it held."""
        if self._slots and self._slots.num_references(shared) == 1:
            self._slots.move(shared, own)
            self._index.lose_window(shared)
        else:
            self._give_slot_back(shared)
            self._take_slot(own)

    def _give_back(self, block_id: int) -> None:
        """One lease less has it."""
        self._references[block_id] -= 1
        if self._references[block_id]:
            return
        if self._states:
            self._states.give_back(block_id)
        if block_id in self._index.by_block:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def _first_needed(self, num_full_blocks: int) -> int:
        """Place of the first block that a sequence needs, in windowed layers, to go on behind so
        many full ones; where it holds no more of these than a window."""
        return max(0, num_full_blocks * self.block_size - self._window + 1) // self.block_size

    def _free_unindexed(self, block_id: int) -> None:
        """A block that nobody finds any more is free, if nobody has it."""
        if not self._references[block_id]:
            del self._cached[block_id]
            self._free.append(block_id)


if TYPE_CHECKING:
    _Numbers = array[int]
else:
    # Python 3.11 cannot subscript it.
    _Numbers = array


class BlockTable(_Numbers):
    """Ids of a sequence's blocks, in order, as 8-byte numbers: in the form that engines copy from.
    It grows at its end: whoever holds a copy takes what was added since.

    num_blocks: of the pool that the ids are of: each is in [0, num_blocks). num_rewrites: how often
    an entry was replaced. A copy of the first n entries, taken at the same num_rewrites, is that of
    the first n now.
    """

    __slots__ = ("num_blocks", "num_rewrites")

    num_blocks: int
    num_rewrites: int

    def __new__(cls, block_ids: Iterable[int], num_blocks: int) -> BlockTable:
        """block_ids: of a pool of num_blocks, which the caller has them from."""
        table = cast(BlockTable, super().__new__(cls, "q", block_ids))
        table.num_blocks = num_blocks
        table.num_rewrites = 0
        return table

    def replace(self, index: int, block_id: int) -> None:
        """Put another block in the place of one."""
        self[index] = block_id
        self.num_rewrites += 1


class BlockLease:
    """Ownership of the blocks of one sequence, in the order of its block table. Given back exactly
    once."""

    __slots__ = (
        "_block_ids",
        "_first_held",
        "_is_live",
        "_last_key",
        "_own_end",
        "_own_start",
        "_places",
        "_pool",
        "num_cached_tokens",
        "window_start",
    )

    def __init__(
        self,
        pool: BlockPool,
        block_ids: Iterable[int],
        num_indexed: int,
        last_key: bytes | None,
        window_start: int = 0,
        first_held: int = 0,
        places: Iterable[int] = (),
    ) -> None:
        """num_indexed: leading blocks that others can find. last_key: of the last of them, or of
        the tenant; None if nothing of this lease is ever to be found. first_held: place of the
        first block that is this lease's. places: of blocks whose slots it holds."""
        self._pool = pool
        self._block_ids = BlockTable(block_ids, pool.num_blocks)
        self.num_cached_tokens = num_indexed * pool.block_size
        """Leading tokens whose KV is computed and indexed."""
        self.window_start = window_start
        """Windowed layers may have no KV of the tokens before."""
        self._first_held = first_held
        self._places = set(places)
        """Of the blocks whose slots are this lease's; none where there are no slots."""
        self._last_key = last_key
        self._is_live = True
        # Tokens [own_start, own_end) are known to lie in blocks of nobody else: what is written
        # next mostly does, and a step that asks so of each of its sequences looks at no block. An
        # empty range claims nothing.
        self._own_start = self._own_end = 0
        pool._leases[id(self)] = self

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
        return self._first_held * self._pool.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks have room for."""
        return len(self._block_ids) * self._pool.block_size

    @property
    def num_exclusive_blocks(self) -> int:
        """Blocks that a release would make available."""
        references = self._pool._references
        return sum(1 for block_id in self.held_block_ids if references[block_id] == 1)

    def num_blocks_to_write(self, start: int, end: int) -> int:
        """Blocks that writing tokens [start, end) takes from the pool: missing ones, and own copies
        of shared ones."""
        if self._own_start <= start and end <= self._own_end:
            return 0
        num_missing = self._pool.num_blocks_for(end) - len(self._block_ids)
        return max(0, num_missing) + len(self._shared_indices(start, end))

    def prepare_write(self, start: int, end: int) -> tuple[BlockCopy, ...] | None:
        """Make tokens [start, end) writable; None, and nothing changed, if there is no room now.

        The caller makes the copies returned before it writes, and before anyone else writes their
        sources.
        """
        pool, block_ids = self._pool, self.block_ids
        if self._own_start <= start and end <= self._own_end:
            return ()
        shared_indices = self._shared_indices(start, end)
        num_missing = max(0, pool.num_blocks_for(end) - len(block_ids))
        if num_missing + len(shared_indices) > pool.num_available:
            return None
        unslotted = self._places_without_slot(start, end) if pool._slots else ()
        if pool._slots and len(unslotted) + len(shared_indices) > pool._slots.num_available:
            return None
        if pool._states and 0 in shared_indices and not pool._states.num_available:
            return None
        copies = []
        for index in shared_indices:
            shared = block_ids[index]
            pool._references[shared] -= 1
            block_ids.replace(index, pool._take())
            copies.append(BlockCopy(shared, block_ids[index]))
            if pool._states and index == 0:
                pool._states.take(block_ids[0])
            if index in self._places:
                pool._own_slot(shared, block_ids[index])
        block_ids.extend(pool._take() for _ in range(num_missing))
        if unslotted:
            self._take_slots(unslotted)
        self._own_start, self._own_end = start, pool.num_blocks_for(end) * pool.block_size
        return tuple(copies)

    def fork(self, num_tokens: int) -> BlockLease:
        """Another lease of the blocks that hold the first `num_tokens` tokens. Takes no block."""
        pool = self._pool
        block_ids = self.block_ids[: pool.num_blocks_for(num_tokens)]
        for block_id in block_ids[self._first_held :]:
            pool._references[block_id] += 1
        places = [place for place in self._places if place < len(block_ids)]
        if pool._slots:
            for place in places:
                pool._slots.hold(block_ids[place])
        self._own_start = self._own_end = 0
        num_indexed = self.num_cached_tokens // pool.block_size
        return BlockLease(
            *(pool, block_ids, num_indexed, self._last_key, self.window_start),
            *(self._first_held, places),
        )

    def reserve(self, first_token: int, end_token: int) -> bool:
        """Hold, of tokens before end_token, blocks of those from first_token on; whether there is
        room now. What is behind them is given back in any case. first_token: 0 for all that is held
        already; else no token before it may be needed any more.

        With full layers all blocks are held: hold slots of these tokens, if there are any, beside
        those that are held.
        """
        pool, block_ids = self._pool, self.block_ids
        if pool._slots:
            unslotted = self._places_without_slot(first_token, end_token)
            if len(unslotted) > pool._slots.num_available:
                return False
            self._take_slots(unslotted)
        if not pool._gives_blocks_back:
            return True
        first = first_token // pool.block_size
        self._give_back_before(first)
        num_missing = pool.num_blocks_for(end_token) - max(first, len(block_ids))
        if num_missing > pool.num_available:
            return False
        block_ids.extend(0 for _ in range(first - len(block_ids)))
        block_ids.extend(pool._take() for _ in range(num_missing))
        return True

    def slide(self, token_ids: Sequence[int], num_computed: int) -> None:
        """The first `num_computed` tokens are computed, and will not be computed again: let others
        find them, and give back the blocks, or the slots, that no later token attends to."""
        pool = self._pool
        if not pool._window:
            return
        first = pool._first_needed(num_computed // pool.block_size)
        if pool._gives_blocks_back and first > self._first_held:
            self.index(token_ids, num_computed)
            self._give_back_before(first)
        elif pool._slots and first * pool.block_size > self.window_start:
            self.index(token_ids, num_computed)
            self._give_slots_back([place for place in self._places if place < first])
            self.window_start = first * pool.block_size

    def _give_back_before(self, first: int) -> None:
        """Hold blocks from place `first` on only."""
        for block_id in self._block_ids[self._first_held : first]:
            self._pool._give_back(block_id)
        self._first_held = max(self._first_held, first)
        self.window_start = max(self.window_start, self.held_start)

    def _places_without_slot(self, start: int, end: int) -> list[int]:
        """Those of tokens [start, end) whose slots are not held, where there are slots."""
        wanted = range(start // self._pool.block_size, self._pool.num_blocks_for(end))
        return [place for place in wanted if place not in self._places]

    def _take_slots(self, places: Sequence[int]) -> None:
        """Of blocks that have none."""
        for place in places:
            self._pool._take_slot(self._block_ids[place])
        self._places.update(places)

    def _give_slots_back(self, places: Sequence[int]) -> None:
        for place in places:
            self._pool._give_slot_back(self._block_ids[place])
        self._places.difference_update(places)

    def received(self, window_start: int) -> None:
        """KV came for what was not cached; in windowed layers from window_start on."""
        if window_start > self.num_cached_tokens:
            self.window_start = max(self.window_start, window_start)

    def _shared_indices(self, start: int, end: int) -> list[int]:
        """Places in the block table, among those that writing tokens [start, end) writes to, of
        blocks that others hold too."""
        size, references = self._pool.block_size, self._pool._references
        first, end_place = start // size, self._pool.num_blocks_for(end)
        indices = list(range(first, min(end_place, len(self._block_ids))))
        if self._pool._states and first:
            indices.insert(0, 0)
        return [index for index in indices if references[self._block_ids[index]] > 1]

    def index(self, token_ids: Sequence[int], num_computed: int) -> None:
        """Let others find the full blocks among the first `num_computed` tokens, whose KV must be
        complete."""
        block_ids, size = self.block_ids, self._pool.block_size
        if self._last_key is None:
            return
        index = self._pool._index
        for place in range(self.num_cached_tokens // size, num_computed // size):
            tokens = token_ids[place * size : (place + 1) * size]
            is_whole = place * size >= self.window_start
            self.num_cached_tokens = (place + 1) * size
            if self._pool._gives_blocks_back and not is_whole:
                self._last_key, _ = index.link(self._last_key, tokens)
                continue
            self._last_key, replaced = index.add(self._last_key, tokens, block_ids[place], is_whole)
            if replaced is not None:
                self._pool._free_unindexed(replaced)
        # Others may take what is indexed from now on.
        self._own_start = max(self._own_start, self.num_cached_tokens)

    def release(self) -> None:
        """Give the blocks back: tails first, so that eviction takes the end of a prefix before its
        beginning. Raises LeaseError the second time."""
        pool = self._pool
        if self._places:
            self._give_slots_back(sorted(self._places, reverse=True))
        for block_id in reversed(self.held_block_ids):
            pool._give_back(block_id)
        del pool._leases[id(self)]
        self._is_live = False
        self._block_ids = BlockTable((), pool.num_blocks)

    def __enter__(self) -> BlockLease:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_live:
            self.release()


@dataclass(frozen=True, slots=True)
class PrefixBlock:
    """A full block in the index. is_whole: whether windowed layers have KV of all its tokens,
    too."""

    key: bytes
    parent: bytes
    tokens: bytes
    block_id: int
    is_whole: bool


class Prefix(NamedTuple):
    """Blocks that hold a prefix, in order. last_key: what the chain goes on from, the key of the
    last of them or of the tenant; None if nothing is looked for. first_whole: blocks from this one
    on are whole; without full layers those before it need not be there, and their ids mean
    nothing."""

    block_ids: Sequence[int]
    last_key: bytes | None
    first_whole: int = 0


_NO_PREFIX = Prefix((), None)


class PrefixIndex:
    """Maps chain keys to blocks and back. Knows nothing of who owns a block."""

    def __init__(
        self, block_size: int, secret: bytes, window: int = 0, has_full_layers: bool = True
    ) -> None:
        """`secret`: 32 bytes, drawn at start. window, has_full_layers: see KvLayout."""
        self._block_size = block_size
        self._window = window
        self._has_full_layers = has_full_layers
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
            if found is None and self._has_full_layers:
                break
            blocks.append(found)
            last_key = key
        num_blocks, first_whole = self._usable(blocks) if self._window else (len(blocks), 0)
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
            # What the token behind this block attends to in windowed layers.
            reach = max(0, (index + 1) * self._block_size - self._window + 1)
            if block and first_whole * self._block_size <= reach:
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

    def lose_window(self, block_id: int) -> None:
        """A block, if it is indexed, holds no KV of windowed layers any more."""
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
