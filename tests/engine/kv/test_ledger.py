"""The ledger accounts for every block once, and finds what nobody owns."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.commands import Abort
from baton.types import KvSource, Sampling, SequenceSpec
from engine.kv.layout import whole_blocks
from engine.kv.lease import BlockLease
from engine.kv.ledger import BlockOwner, ListBlocks, num_orphan_blocks, take_ledger
from engine.kv.pool import BlockPool
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.sim_tiers import SimDecode, SimPrefill
from worker_core.commands import KnownSequences, Open, StreamCommand

quick = settings(deadline=None, database=None, max_examples=80)
NUM_BLOCKS, BLOCK_SIZE = 12, 2


def owner_of(lease: BlockLease) -> BlockOwner:
    return BlockOwner("r", 0, "running", 0, tuple(lease.block_ids))


@quick
@given(st.data())
def test_every_block_is_free_cached_owned_or_an_orphan(data):
    pool = BlockPool(NUM_BLOCKS, whole_blocks(BLOCK_SIZE), secret=bytes(32))
    leases: list[BlockLease] = []
    for _ in range(data.draw(st.integers(0, 8))):
        # Common beginnings, so that some blocks have several owners.
        tokens = [1, 2, 3, 4, *data.draw(st.lists(st.integers(0, 9), max_size=6))]
        lease = pool.lease(b"", tokens, len(tokens))
        if lease is None:
            continue
        lease.index(tokens, len(tokens))
        if data.draw(st.booleans()):
            leases.append(lease)
        else:
            lease.release()
    known = [lease for lease in leases if data.draw(st.booleans())]
    ledger = take_ledger(pool, map(owner_of, known))
    owned = {block for owner in ledger.owners for block in owner.block_ids}
    parts = [set(ledger.free), set(ledger.cached), owned, set(ledger.orphans)]
    assert sum(map(len, parts)) == NUM_BLOCKS
    assert set().union(*parts) == set(range(NUM_BLOCKS))
    held = {block for lease in leases for block in lease.block_ids}
    assert set(ledger.orphans) == held - owned
    assert num_orphan_blocks(pool, known) == len(ledger.orphans)


def spec_of(name: str, num_tokens: int) -> SequenceSpec:
    return SequenceSpec(name, tuple(range(1, num_tokens + 1)), Sampling(max_tokens=5))


def test_a_decode_worker_tells_who_has_its_blocks():
    worker, told = SimDecode(LoopbackHub(), lambda: 0.0), []
    worker.submit(Open(0, 1, spec_of("waits", 10), KvSource.PREFILL))
    worker.submit(Open(0, 2, spec_of("runs", 5), KvSource.LOCAL))
    worker.submit(ListBlocks(told.append))
    worker.step()
    (ledger,) = told
    owners = {owner.request_id: owner for owner in ledger.owners}
    assert owners["waits"].stage == "awaiting_kv"
    assert owners["waits"].ticket_id
    assert owners["runs"].stage == "running"
    assert owners["runs"].ticket_id == 0
    num_owned = sum(len(owner.block_ids) for owner in ledger.owners)
    assert num_owned == worker.pool.counts().leased
    assert ledger.orphans == ()


def test_a_prefill_worker_tells_who_has_its_blocks():
    worker, told = SimPrefill(LoopbackHub(), lambda: 0.0), []
    worker.open(0, 1, spec_of("long", 60))
    worker.step()
    worker.submit(ListBlocks(told.append))
    step = worker.step()
    assert step.load.num_orphan_blocks == 0
    (ledger,) = told
    (owner,) = ledger.owners
    assert (owner.request_id, owner.stage) == ("long", "running")


def test_a_lease_that_was_forgotten_shows_in_the_load():
    worker = SimDecode(LoopbackHub(), lambda: 0.0)
    lost = worker.pool.lease(b"", [1, 2, 3], 9)
    assert lost is not None
    told = []
    worker.submit(ListBlocks(told.append))
    assert worker.step().load.num_orphan_blocks == len(lost.block_ids)
    assert set(told[0].orphans) == set(lost.block_ids)


def test_what_a_gateway_has_forgotten_is_ended_and_counted():
    worker = SimDecode(LoopbackHub(), lambda: 0.0)
    for handle, source in ((1, KvSource.LOCAL), (2, KvSource.PREFILL), (3, KvSource.LOCAL)):
        worker.submit(Open(0, handle, spec_of(f"r{handle}", 10), source))
    worker.submit(Open(1, 9, spec_of("another gateway's", 10), KvSource.LOCAL))
    worker.submit(KnownSequences(0, frozenset({3})))
    assert worker.step().load.num_orphan_sequences == 2
    told = []
    worker.submit(KnownSequences(0, frozenset({3})))
    worker.submit(ListBlocks(told.append))
    load = worker.step().load
    assert load.num_orphan_sequences == 2
    assert load.num_open_tickets == 0
    assert {owner.request_id for owner in told[0].owners} == {"r3", "another gateway's"}


def test_a_sequence_is_known_by_any_of_its_choices():
    worker = SimDecode(LoopbackHub(), lambda: 0.0)
    spec = replace(spec_of("three", 10), num_choices=3)
    worker.submit(Open(0, 4, spec, KvSource.PREFILL))
    worker.submit(KnownSequences(0, frozenset({6})))
    assert worker.step().load.num_orphan_sequences == 0
    worker.submit(KnownSequences(0, frozenset({7})))
    assert worker.step().load.num_orphan_sequences == 1


def test_what_was_given_up_is_no_orphan():
    worker = SimDecode(LoopbackHub(), lambda: 0.0)
    worker.submit(Open(0, 1, spec_of("waits", 10), KvSource.PREFILL))
    worker.step()
    worker.submit(StreamCommand(0, 1, Abort()))
    worker.submit(KnownSequences(0, frozenset()))
    assert worker.step().load.num_orphan_sequences == 0
