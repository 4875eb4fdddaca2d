"""Slots of states go where a sequence's first block goes: each has one owner, and none is left
behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.config import DecodeOptions
from baton.config.load import build_options
from baton.types import KvLayout
from engine.kv.groups.group import SlotTable
from engine.kv.groups.state import StateSlots
from engine.kv.layout import groups_of
from engine.kv.lease import BlockLease
from engine.kv.pool import BlockPool
from engine.oracle import OracleEngine, OracleLayers, OracleOptions
from worker_core.build import build_pool

NUM_BLOCKS, NUM_SLOTS, SIZE = 14, 4, 4
LAYOUT = KvLayout(*("m", 1, 1, 1, "int8", SIZE), num_state_layers=1, state_layer_bytes=4)


def make_pool() -> tuple[BlockPool, SlotTable]:
    table = SlotTable.empty(NUM_BLOCKS, NUM_SLOTS)
    options = {"enable_prefix_caching": False, "allocators": [StateSlots(table)]}
    return BlockPool(NUM_BLOCKS, groups_of(LAYOUT), secret=bytes(32), **options), table


class StateMachine(RuleBasedStateMachine):
    """Leases come, fork, write and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.table = make_pool()
        self.live: list[BlockLease] = []

    @rule(num_tokens=st.integers(1, 9))
    def lease(self, num_tokens: int) -> None:
        lease = self.pool.lease(b"", [1] * num_tokens, num_tokens)
        if lease:
            assert lease.num_cached_tokens == 0
            self.live.append(lease)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.live))
        self.live.append(lease.fork(data.draw(st.integers(1, lease.num_tokens))))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_new=st.integers(1, 5))
    def write(self, data: st.DataObject, num_new: int) -> None:
        """Whoever writes has a slot of its own then, with what the shared one held."""
        lease = data.draw(st.sampled_from(self.live))
        start = data.draw(st.integers(0, lease.num_tokens))
        before = lease.block_ids[0]
        num_needed = lease.num_blocks_to_write(start, start + num_new)
        num_available = self.pool.num_available
        copies = lease.prepare_write(start, start + num_new)
        if copies is None:
            assert self.pool.num_available == num_available
            return
        assert self.pool.num_available == num_available - num_needed
        first = lease.block_ids[0]
        assert sum(other.block_ids[0] == first for other in self.live) == 1
        assert first == before or any((c.source, c.target) == (before, first) for c in copies)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.live))
        self.live.remove(lease)
        lease.release()

    @invariant()
    def is_whole(self) -> None:
        self.pool.check_integrity()
        num_used = sum(slot >= 0 for slot in self.table.of_block)
        assert num_used == len({lease.block_ids[0] for lease in self.live})


TestStateMachine = StateMachine.TestCase


def test_a_sequence_without_a_slot_does_not_come_in() -> None:
    pool, _ = make_pool()
    leases = [pool.lease(b"", [1], 1) for _ in range(NUM_SLOTS)]
    assert pool.lease(b"", [1], 1) is None
    assert pool.counts().leased == NUM_SLOTS
    assert leases[0] is not None
    leases[0].release()
    assert pool.lease(b"", [1], 1) is not None


def test_a_worker_that_shall_find_prefixes_says_that_it_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = OracleEngine(OracleOptions(num_blocks=4, layers=OracleLayers(has_states=True)))
    with caplog.at_level("INFO"):
        pool = build_pool(build_options(DecodeOptions, {"model": "m"}), engine, bytes(32))
    assert "prefix caching is off: m has layers with a state" in caplog.text
    tokens = range(3 * pool.block_size)
    lease = pool.lease(b"", tokens, len(tokens))
    assert lease
    lease.index(tokens, len(tokens))
    lease.release()
    assert pool.counts().cached == pool.num_cached_tokens(b"", tokens) == 0
    pool.check_integrity()


def test_sequences_with_a_state_share_no_prefix() -> None:
    slots = [StateSlots(SlotTable.empty(2, 1))]
    with pytest.raises(ValueError, match="share no prefix"):
        BlockPool(2, groups_of(LAYOUT), secret=bytes(32), allocators=slots)
    windowed = replace(LAYOUT, window=2, windowed_layers=(0,))
    with pytest.raises(ValueError, match="first blocks"):
        BlockPool(
            *(2, groups_of(windowed)),
            secret=bytes(32),
            enable_prefix_caching=False,
            allocators=slots,
        )
