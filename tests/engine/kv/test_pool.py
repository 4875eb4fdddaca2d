"""The block pool: conservation, single release, and prefixes that are only ever found where they
were computed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.types import KvLayout
from engine.kv.groups.group import SlotTable
from engine.kv.groups.window import WindowSlots
from engine.kv.layout import groups_of
from engine.kv.lease import BlockLease, LeaseError
from engine.kv.pool import BlockPool
from engine.kv.prefix_index import BlockIdentity

SECRET = bytes(range(32))
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=24)
TENANTS = st.sampled_from([b"", b"a"])


def make_pool(
    num_blocks: int = 12,
    block_size: int = 4,
    window: int = 0,
    has_full_layers: bool = True,
    **options: Any,
) -> BlockPool:
    """window: of one layer, beside another one that keeps all tokens if has_full_layers."""
    num_layers = 1 + (window > 0 and has_full_layers)
    layout = KvLayout(
        *("m", num_layers, 1, 1, "int8", block_size),
        window=window,
        windowed_layers=(num_layers - 1,) if window else (),
    )
    return BlockPool(num_blocks, groups_of(layout), secret=SECRET, **options)


class PoolMachine(RuleBasedStateMachine):
    """Leases come, grow, are indexed and go, in any order; the model remembers what each block last
    held."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.live: list[tuple[BlockLease, bytes, list[int]]] = []
        self.held: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    @rule(tenant=TENANTS, tokens=TOKENS, extra=st.integers(0, 8))
    def lease(self, tenant: bytes, tokens: list[int], extra: int) -> None:
        available = self.pool.counts().available
        lease = self.pool.lease(tenant, tokens, len(tokens) + extra)
        if lease is None:
            assert self.pool.num_blocks_for(len(tokens) + extra) > 0
            assert self.pool.counts().available == available
            return
        assert lease.num_cached_tokens < len(tokens)
        for index, block_id in enumerate(lease.block_ids):
            if index * 4 < lease.num_cached_tokens:
                assert self.held[block_id] == (tenant, tuple(tokens[: index * 4 + 4]))
        self.write(lease, tenant, tokens)
        self.live.append((lease, tenant, tokens))

    def write(self, lease: BlockLease, tenant: bytes, tokens: list[int]) -> None:
        for index, block_id in enumerate(lease.block_ids):
            if (index + 1) * 4 > lease.num_cached_tokens:
                self.held[block_id] = (tenant, tuple(tokens[: index * 4 + 4]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def index(self, data: st.DataObject) -> None:
        lease, _, tokens = data.draw(st.sampled_from(self.live))
        lease.index(tokens, data.draw(st.integers(lease.num_cached_tokens, len(tokens))))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_more=st.integers(1, 9))
    def grow(self, data: st.DataObject, num_more: int) -> None:
        lease, tenant, tokens = data.draw(st.sampled_from(self.live))
        before = list(lease.block_ids)
        if lease.prepare_write(lease.num_tokens, lease.num_tokens + num_more) is not None:
            assert list(lease.block_ids[: len(before)]) == before
            for block_id in lease.block_ids[len(before) :]:
                self.held[block_id] = (tenant, tuple(tokens))
        else:
            assert list(lease.block_ids) == before

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        lease, tenant, tokens = data.draw(st.sampled_from(self.live))
        num_tokens = data.draw(st.integers(lease.num_cached_tokens, len(tokens)))
        available = self.pool.counts().available
        child = lease.fork(num_tokens)
        assert child.block_ids == lease.block_ids[: self.pool.num_blocks_for(num_tokens)]
        assert self.pool.counts().available == available
        self.live.append((child, tenant, tokens[:num_tokens]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        """Nobody else sees what a lease writes, and the writer keeps what it had."""
        lease, tenant, tokens = data.draw(st.sampled_from(self.live))
        start = data.draw(st.integers(lease.num_cached_tokens, len(tokens)))
        end = start + data.draw(st.integers(1, 9))
        others = [b for other, _, _ in self.live if other is not lease for b in other.block_ids]
        before = list(lease.block_ids)
        num_needed = lease.num_blocks_to_write(start, end)
        available = self.pool.counts().available
        copies = lease.prepare_write(start, end)
        if copies is None:
            assert num_needed > available
            assert list(lease.block_ids) == before
            return
        assert self.pool.counts().available == available - num_needed
        for copy in copies:
            assert before[lease.block_ids.index(copy.target)] == copy.source
            self.held[copy.target] = self.held[copy.source]
        for index in range(start // 4, self.pool.num_blocks_for(end)):
            assert lease.block_ids[index] not in others
            self.held[lease.block_ids[index]] = (tenant, tuple(tokens[: index * 4 + 4]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.live))
        self.live.remove(entry)
        freed = entry[0].num_exclusive_blocks
        available = self.pool.counts().available
        entry[0].release()
        assert self.pool.counts().available == available + freed
        with pytest.raises(LeaseError):
            entry[0].release()

    @invariant()
    def is_whole(self) -> None:
        self.pool.check_integrity()
        assert self.pool.counts().total == 12

    def teardown(self) -> None:
        for lease, _, _ in self.live:
            lease.release()
        assert self.pool.counts().leased == 0
        self.pool.check_integrity()


TestPoolMachine = PoolMachine.TestCase


class WindowedPoolMachine(RuleBasedStateMachine):
    """Sequences are computed here, or come with the window alone, and are found again; the model
    remembers which tokens of each block windowed layers have."""

    WINDOW = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(num_blocks=20, window=self.WINDOW)
        self.present: dict[int, set[int]] = {}
        self.live: list[BlockLease] = []

    @rule(tokens=TOKENS, comes_from_elsewhere=st.booleans(), slack=st.integers(0, 5))
    def take_in(self, tokens: list[int], comes_from_elsewhere: bool, slack: int) -> None:
        lease = self.pool.lease(b"", tokens, len(tokens))
        if lease is None:
            return
        cached, start = lease.num_cached_tokens, max(0, len(tokens) - self.WINDOW + 1 - slack)
        self.is_readable(lease, cached)
        first_token = max(cached, start) if comes_from_elsewhere else cached
        if comes_from_elsewhere:
            lease.received(first_token)
        for index in range(cached // 4, len(lease.block_ids)):
            places = range(max(index * 4, first_token), min(len(tokens), index * 4 + 4))
            self.present[lease.block_ids[index]] = set(places)
        self.is_readable(lease, len(tokens))
        lease.index(tokens, len(tokens))
        self.live.append(lease)

    def is_readable(self, lease: BlockLease, num_tokens: int) -> None:
        """What the next token attends to in windowed layers is there, and all that is said to be
        there."""
        assert lease.whole_start <= max(0, num_tokens - self.WINDOW + 1)
        for token in range(lease.whole_start, num_tokens):
            assert token in self.present[lease.block_ids[token // 4]]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.live))
        self.live.remove(lease)
        lease.release()

    @invariant()
    def is_whole(self) -> None:
        self.pool.check_integrity()

    def teardown(self) -> None:
        for lease in self.live:
            lease.release()
        assert self.pool.counts().leased == 0
        self.pool.check_integrity()


TestWindowedPoolMachine = WindowedPoolMachine.TestCase


class HeldWindowMachine(RuleBasedStateMachine):
    """A model with windowed layers only: sequences grow, fork, and are found again. The state
    machine remembers which tokens each block has KV of."""

    WINDOW = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(num_blocks=20, window=self.WINDOW, has_full_layers=False)
        self.present: dict[int, tuple[int, ...]] = {}
        """By block: the prefix up to the block's last token that was computed."""
        self.live: list[tuple[BlockLease, list[int]]] = []

    @rule(tokens=TOKENS, extra=st.integers(0, 12), comes_from_elsewhere=st.booleans())
    def take_in(self, tokens: list[int], extra: int, comes_from_elsewhere: bool) -> None:
        tokens = tokens + [1] * extra
        start = max(0, len(tokens) // 4 * 4 - self.WINDOW + 1) // 4 * 4
        least = start if comes_from_elsewhere else 0
        lease = self.pool.lease(b"", tokens, 0, min_prefix_tokens=least)
        assert lease is not None
        cached = lease.num_cached_tokens
        self.is_readable(lease, tokens, cached)
        first_token = cached or least
        if not lease.reserve(0 if cached else least, len(tokens)):
            lease.release()
            return
        if comes_from_elsewhere:
            lease.received(first_token)
        self.compute(lease, tokens, first_token)
        lease.index(tokens, len(tokens))
        self.live.append((lease, tokens))

    def compute(self, lease: BlockLease, tokens: list[int], first_token: int) -> None:
        for index in range(first_token // 4, -(-len(tokens) // 4)):
            self.present[lease.block_ids[index]] = tuple(tokens[: index * 4 + 4])
        self.is_readable(lease, tokens, len(tokens))

    def is_readable(self, lease: BlockLease, tokens: list[int], num_tokens: int) -> None:
        """What the next token attends to is there."""
        reach = max(0, num_tokens - self.WINDOW + 1)
        assert lease.held_start <= reach
        for index in range(reach // 4, -(-num_tokens // 4)):
            found = self.present[lease.block_ids[index]]
            assert found[:num_tokens] == tuple(tokens[: min(index * 4 + 4, num_tokens)])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_new=st.integers(1, 9))
    def grow(self, data: st.DataObject, num_new: int) -> None:
        lease, tokens = data.draw(st.sampled_from(self.live))
        start = len(tokens)
        copies = lease.prepare_write(start, start + num_new)
        if copies is None:
            return
        for copy in copies:
            self.present[copy.target] = self.present[copy.source]
        tokens.extend(data.draw(st.integers(0, 1)) for _ in range(num_new))
        self.compute(lease, tokens, start)
        lease.slide(tokens, len(tokens))
        assert len(lease.held_block_ids) <= (self.WINDOW + 2 * 4) // 4
        self.is_readable(lease, tokens, len(tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        lease, tokens = data.draw(st.sampled_from(self.live))
        fork = lease.fork(len(tokens))
        self.is_readable(fork, tokens, len(tokens))
        self.live.append((fork, list(tokens)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.live) - 1))
        lease, _ = self.live.pop(place)
        available = self.pool.num_available
        freed = lease.num_exclusive_blocks
        lease.release()
        assert self.pool.num_available == available + freed

    @invariant()
    def is_whole(self) -> None:
        self.pool.check_integrity()

    def teardown(self) -> None:
        for lease, _ in self.live:
            lease.release()
        assert self.pool.counts().leased == 0
        self.pool.check_integrity()


TestHeldWindowMachine = HeldWindowMachine.TestCase


def test_a_prefix_is_found_by_the_blocks_of_its_window_alone() -> None:
    pool = make_pool(num_blocks=4, window=6, has_full_layers=False)
    turn = [*range(40)]
    lease = pool.lease(b"", turn, 8)
    assert lease is not None
    for end in range(4, 41, 4):
        assert lease.prepare_write(end - 4, end) == ()
        lease.slide(turn, end)
        assert len(lease.held_block_ids) <= 3
    lease.index(turn, 40)
    lease.release()
    assert pool.num_cached_tokens(b"", [*turn, 1]) == 40
    assert pool.num_cached_tokens(b"", turn[:21]) == 0, "its blocks were taken for what followed"
    with pool.lease(b"", [*turn, 1], 41) as found:
        assert (found.num_cached_tokens, found.held_start) == (40, 32)
        pool.check_integrity()


def test_a_conversation_goes_on_from_the_window_and_another_one_not_from_within() -> None:
    pool = make_pool(window=6)
    turn = [*range(20)]
    with pool.lease(b"", turn, 20) as lease:
        lease.received(12)
        lease.index(turn, 20)
    assert pool.num_cached_tokens(b"", [*turn, 1, 2]) == 20
    assert pool.num_cached_tokens(b"", [*turn[:12], 1, 2]) == 0
    with pool.lease(b"", [*turn[:12], 1], 13) as lease:  # computed here, and whole from now on
        lease.index([*turn[:12], 1], 12)
    assert pool.num_cached_tokens(b"", [*turn[:12], 1, 2]) == 12
    assert pool.num_cached_tokens(b"", [*turn, 1, 2]) == 20
    pool.check_integrity()


def test_a_second_request_shares_the_first_ones_full_blocks_but_computes_its_last_token() -> None:
    pool = make_pool()
    tokens = list(range(8))
    first = pool.lease(b"", tokens, 8)
    assert first is not None
    first.index(tokens, 8)
    second = pool.lease(b"", tokens, 9)
    assert second is not None
    assert second.num_cached_tokens == 4  # the second block ends with the last token
    assert second.block_ids[0] == first.block_ids[0]
    assert set(second.block_ids[1:]).isdisjoint(first.block_ids)


def test_a_block_that_others_may_have_found_is_asked_for_anew() -> None:
    pool = make_pool()
    tokens = list(range(8))
    writer = pool.lease(b"", tokens, 8)
    assert writer is not None
    assert writer.prepare_write(0, 8) == ()
    assert writer.num_blocks_to_write(0, 8) == 0
    writer.index(tokens, 8)
    reader = pool.lease(b"", [*tokens, 8], 9)
    assert reader is not None
    assert reader.num_cached_tokens == 8
    assert writer.num_blocks_to_write(0, 8) == 2
    reader.release()
    assert writer.num_blocks_to_write(0, 8) == 0


def test_tenants_never_share() -> None:
    pool = make_pool()
    tokens = list(range(8))
    with pool.lease(b"a", tokens, 8) or pytest.fail("no room") as lease:
        lease.index(tokens, 8)
    assert pool.num_cached_tokens(b"a", tokens) == 4
    assert pool.num_cached_tokens(b"b", tokens) == 0


def test_eviction_takes_the_least_recently_used_tail_first() -> None:
    pool = make_pool(num_blocks=4)
    tokens = list(range(13))
    with pool.lease(b"", tokens, 13) or pytest.fail("no room") as lease:
        lease.index(tokens, 12)
    assert pool.num_cached_tokens(b"", tokens) == 12
    other = pool.lease(b"", [9, 9], 8)  # one free block, and one that must be evicted
    assert other is not None
    assert pool.num_cached_tokens(b"", tokens) == 8


def test_a_prefix_that_is_found_is_not_counted_as_room_too() -> None:
    """Sharing its blocks takes them from those that can be had."""
    pool = make_pool(num_blocks=4)
    tokens = list(range(13))
    with pool.lease(b"", tokens, 13) or pytest.fail("no room") as lease:
        lease.index(tokens, 12)
    assert pool.num_available == 4
    assert pool.lease(b"", tokens, 17) is None, "three that are found and two fresh ones are five"
    assert pool.cached_block_ids
    with pool.lease(b"", tokens, 16) or pytest.fail("no room"):
        assert pool.num_available == 0
    pool.check_integrity()


def test_a_block_in_the_wrong_index_is_noticed() -> None:
    for fault in ("a cached block is not indexed", "a free block is indexed"):
        pool = make_pool()
        with pool.lease(b"", [1, 2, 3, 4, 5], 5) or pytest.fail("no room") as lease:
            lease.index([1, 2, 3, 4], 4)
        pool.check_integrity()
        (cached,) = pool.cached_block_ids
        entries = pool._blocks.index.by_block
        if "not" in fault:
            del entries[cached]
        else:
            entries[pool._blocks.free[0]] = entries[cached]
        with pytest.raises(AssertionError, match=fault):
            pool.check_integrity()


def test_of_those_that_share_a_block_with_nobody_else_the_last_to_write_keeps_it() -> None:
    pool = make_pool()
    first = pool.lease(b"", [1, 2], 2)
    assert first is not None
    leases = [first, first.fork(2), first.fork(2)]
    other = first.fork(2)
    assert pool.num_blocks_to_write(leases, 2, 3) == 3, "the fourth holds it, too"
    other.release()
    num_available = pool.num_available
    assert pool.num_blocks_to_write(leases, 2, 3) == 2
    for lease in leases:
        assert lease.prepare_write(2, 3) is not None
    assert num_available - pool.num_available == 2
    for lease in leases:
        lease.release()


def test_a_forged_collision_of_keys_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_key(tenant: bytes, parent: bytes, ids: Sequence[int]) -> BlockIdentity:
        return BlockIdentity(b"same", parent, bytes(ids), tenant)

    pool = make_pool()
    monkeypatch.setattr(pool._blocks.index, "link", same_key)
    with pool.lease(b"", [1, 2, 3, 4, 5], 5) or pytest.fail("no room") as lease:
        lease.index([1, 2, 3, 4, 5], 4)
    assert pool.num_cached_tokens(b"", [1, 2, 3, 4, 5]) == 4
    assert pool.num_cached_tokens(b"", [4, 3, 2, 1, 5]) == 0


def test_the_same_tokens_after_another_beginning_are_a_miss_whatever_their_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def key_of_tokens(tenant: bytes, parent: bytes, ids: Sequence[int]) -> BlockIdentity:
        return BlockIdentity(bytes(ids), parent, bytes(ids), tenant)

    pool = make_pool()
    monkeypatch.setattr(pool._blocks.index, "link", key_of_tokens)
    tokens = [1, 1, 1, 1, 2, 2, 2, 2, 3]
    with pool.lease(b"", tokens, 9) or pytest.fail("no room") as lease:
        lease.index(tokens, 8)
    assert pool.num_cached_tokens(b"", tokens) == 8
    assert pool.num_cached_tokens(b"", tokens[4:]) == 0


def test_without_prefix_caching_nothing_is_found_and_nothing_stays() -> None:
    pool = make_pool(enable_prefix_caching=False)
    tokens = list(range(9))
    with pool.lease(b"", tokens, 9) or pytest.fail("no room") as lease:
        lease.index(tokens, 9)
    assert pool.num_cached_tokens(b"", tokens) == 0
    assert pool.counts().free == 12


@given(tokens=TOKENS, num_tokens=st.integers(49, 200))
def test_full_is_a_value(tokens: list[int], num_tokens: int) -> None:
    pool = make_pool()
    assert pool.lease(b"", tokens, num_tokens) is None
    assert pool.counts().free == 12


class SlottedPoolMachine(RuleBasedStateMachine):
    """A model with both kinds of layers and slots for the windowed ones: sequences grow, fork, and
    are found again. The state machine remembers which prefix each block's full layers and each slot
    have KV of."""

    WINDOW = 6

    def __init__(self) -> None:
        super().__init__()
        self.slots = WindowSlots(SlotTable.empty(20, 9))
        self.pool = make_pool(num_blocks=20, window=self.WINDOW, allocators=[self.slots])
        self.in_block: dict[int, tuple[int, ...]] = {}
        self.in_slot: dict[int, tuple[int, ...]] = {}
        self.live: list[tuple[BlockLease, list[int]]] = []

    @rule(tokens=TOKENS, extra=st.integers(0, 12), comes_from_elsewhere=st.booleans())
    def take_in(self, tokens: list[int], extra: int, comes_from_elsewhere: bool) -> None:
        tokens = tokens + [1] * extra
        lease = self.pool.lease(b"", tokens, len(tokens))
        if lease is None:
            return
        cached = lease.num_cached_tokens
        self.is_readable(lease, tokens, cached)
        start = max(0, len(tokens) // 4 * 4 - self.WINDOW + 1) // 4 * 4
        first_token = max(cached, start) if comes_from_elsewhere else cached
        if comes_from_elsewhere:
            has_room = lease.reserve(start, len(tokens))
        else:
            has_room = lease.prepare_write(cached, len(tokens)) is not None
        if not has_room:
            lease.release()
            return
        if comes_from_elsewhere:
            lease.received(first_token)
        self.compute(lease, tokens, cached, first_token)
        lease.index(tokens, len(tokens))
        lease.slide(tokens, len(tokens))
        self.live.append((lease, tokens))

    def compute(
        self, lease: BlockLease, tokens: list[int], start: int, first_windowed: int
    ) -> None:
        for index in range(start // 4, -(-len(tokens) // 4)):
            prefix, block_id = tuple(tokens[: index * 4 + 4]), lease.block_ids[index]
            self.in_block[block_id] = prefix
            if index >= first_windowed // 4:
                self.in_slot[self.slots.of_block[block_id]] = prefix
        assert -1 not in self.in_slot
        self.is_readable(lease, tokens, len(tokens))

    def is_readable(self, lease: BlockLease, tokens: list[int], num_tokens: int) -> None:
        """What the next token attends to is there."""
        reach = max(0, num_tokens - self.WINDOW + 1)
        assert lease.whole_start <= reach
        for index in range(-(-num_tokens // 4)):
            expected, block_id = tuple(tokens[: index * 4 + 4])[:num_tokens], lease.block_ids[index]
            assert self.in_block[block_id][:num_tokens] == expected
            if index >= reach // 4:
                assert self.in_slot[self.slots.of_block[block_id]][:num_tokens] == expected

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_new=st.integers(1, 9))
    def grow(self, data: st.DataObject, num_new: int) -> None:
        lease, tokens = data.draw(st.sampled_from(self.live))
        start = len(tokens)
        before = self.slots.counts().leased
        copies = lease.prepare_write(start, start + num_new)
        if copies is None:
            assert self.slots.counts().leased == before
            return
        for copy in copies:
            self.in_block[copy.target] = self.in_block[copy.source]
            if (slot := self.slots.of_block[copy.source]) >= 0:
                self.in_slot[self.slots.of_block[copy.target]] = self.in_slot[slot]
        tokens.extend(data.draw(st.integers(0, 1)) for _ in range(num_new))
        self.compute(lease, tokens, start, start)
        lease.slide(tokens, len(tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        lease, tokens = data.draw(st.sampled_from(self.live))
        fork = lease.fork(len(tokens))
        self.is_readable(fork, tokens, len(tokens))
        self.live.append((fork, list(tokens)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        lease.release()

    @invariant()
    def is_whole(self) -> None:
        self.pool.check_integrity()

    def teardown(self) -> None:
        for lease, _ in self.live:
            lease.release()
        assert self.pool.counts().leased == self.slots.counts().leased == 0
        counts = self.pool.slot_counts()
        assert (counts.leased, counts.available) == (0, counts.total) == (0, 9)
        self.pool.check_integrity()


TestSlottedPoolMachine = SlottedPoolMachine.TestCase


def test_a_slot_that_moves_to_a_copy_leaves_its_block_partial() -> None:
    """The other holder of the block has its window behind it, so that the slot has one holder."""
    slots = WindowSlots(SlotTable.empty(4, 2))
    partial: list[int] = []
    slots.bind(SimpleNamespace(is_whole=lambda _: True, set_partial=partial.append))
    held: set[int] = set()
    slots.on_write(held, (0,), range(1))
    slots.on_copy(held, 0, 0, 3)
    assert [*slots.of_block] == [-1, -1, -1, 0]
    assert partial == [0]


def test_a_prefix_whose_windows_slots_went_to_others_is_computed_again() -> None:
    slots = WindowSlots(SlotTable.empty(20, 4))
    pool = make_pool(num_blocks=20, window=6, allocators=[slots])

    def serve(turn: list[int]) -> None:
        lease = pool.lease(b"", turn, len(turn))
        assert lease is not None
        for end in range(lease.num_cached_tokens + 4, len(turn) + 1, 4):
            assert lease.prepare_write(end - 4, end) == ()
            lease.slide(turn, end)
            assert slots.counts().leased <= 3
        lease.index(turn, len(turn))
        lease.release()
        pool.check_integrity()

    first, second = [*range(20)], [*range(100, 120)]
    serve(first)
    assert pool.num_cached_tokens(b"", [*first, 1]) == 20
    serve(second)
    assert pool.num_cached_tokens(b"", [*second, 1]) == 20
    assert pool.num_cached_tokens(b"", [*first, 1]) == 0, "the blocks are there, the window is not"
    serve(first)
    assert pool.num_cached_tokens(b"", [*first, 1]) == 20


def test_only_blocks_that_no_other_lease_holds_become_available() -> None:
    pool = make_pool()
    lease = pool.lease(b"", list(range(8)), 8)
    assert lease is not None
    fork = lease.fork(8)
    assert pool.num_exclusive_blocks([lease]) == pool.num_exclusive_blocks([fork]) == 0
    assert pool.num_exclusive_blocks([lease, fork]) == 2
