"""Places in the batch follow the members, and members are ordered by rank, whatever came, left, or
took another's place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.types import Sampling, SequenceSpec
from bench.stub_engine import BLOCK_SIZE, StubEngine
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from worker_core.sequence import Stage, WorkerSequence
from worker_core.state import CoreState
from worker_core.swap import no_swap

#: (handle, choices of the sequence that comes; 0: whoever has the handle leaves).
EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=20)
#: (stream, handle, arrival of the sequence that comes; None: whoever has the handle leaves). Two
#: gateways may give the same rank.
RANKED = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 2) | st.none()), max_size=20
)


@given(EVENTS)
def test_places_are_the_members_widths(events: list[tuple[int, int]]) -> None:
    engine = StubEngine(num_blocks=64)
    pool = BlockPool(64, whole_blocks(BLOCK_SIZE), secret=bytes(32))
    state = CoreState(engine.spec, pool, no_swap(engine.kv), lambda: 0.0)
    for handle, num_choices in events:
        before = state.groups.get((0, handle))
        if num_choices:
            spec = SequenceSpec("r", (1, 2, 3), Sampling(), num_choices=num_choices)
            lease = pool.lease(b"", spec.token_ids, 4)
            assert lease is not None
            state.put(WorkerSequence(0, handle, spec, lease, Stage.RUNNING, 0))
        elif before is not None:
            state.forget(before)
        assert state.num_places == sum(member.spec.width for member in state.groups.values())


@given(RANKED)
def test_members_are_told_by_rank(events: list[tuple[int, int, int | None]]) -> None:
    engine = StubEngine(num_blocks=64)
    pool = BlockPool(64, whole_blocks(BLOCK_SIZE), secret=bytes(32))
    state = CoreState(engine.spec, pool, no_swap(engine.kv), lambda: 0.0)
    here: dict[tuple[int, int], WorkerSequence] = {}
    for stream, handle, arrival_ns in events:
        if arrival_ns is not None:
            spec = SequenceSpec("r", (1, 2, 3), Sampling(), arrival_ns=arrival_ns)
            lease = pool.lease(b"", spec.token_ids, 4)
            assert lease is not None
            sequence = WorkerSequence(stream, handle, spec, lease, Stage.RUNNING, 0)
            here[stream, handle] = sequence
            state.put(sequence)
        elif (stream, handle) in here:
            state.forget(here.pop((stream, handle)))
        told = state.in_stage(Stage.RUNNING)
        assert [member.rank for member in told] == sorted(member.rank for member in told)
        assert {id(member) for member in told} == {id(member) for member in here.values()}
