"""The decode core alone: what it tells of a sequence that was given up, and when it has no room."""

from __future__ import annotations

from baton.events import Deferred, Offered, PrefillsHere
from baton.types import KvSource, Sampling, SequenceSpec
from decode_svc.commands import Abort, Open
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.sim_tiers import SimDecode, SimShape


def worker(**shape: int) -> SimDecode:
    return SimDecode(LoopbackHub(), lambda: 0.0, SimShape(**shape))


def spec_of(name: str, num_tokens: int) -> SequenceSpec:
    return SequenceSpec(name, tuple(range(1, num_tokens + 1)), Sampling(max_tokens=50))


def test_nothing_is_told_of_a_sequence_after_it_was_given_up() -> None:
    decoder = worker()
    decoder.submit(Open(0, 1, spec_of("a", 10), KvSource.PREFILL_WORKER))
    (offered,) = decoder.step().events
    assert isinstance(offered.event, Offered)
    decoder.submit(Abort(0, 1))
    assert not decoder.step().events
    assert decoder.inbox, "the ticket's end is on its way to the core"
    assert not decoder.step().events
    assert decoder.pool.counts().leased == 0


def test_a_new_sequence_waits_while_the_running_ones_need_the_blocks_that_are_left() -> None:
    decoder = worker(num_blocks=10)
    # Two sequences of 4 blocks each leave 2: one block for each of them to grow into, none for a third.
    for handle in (1, 2):
        decoder.submit(Open(0, handle, spec_of(f"r{handle}", 15), KvSource.HERE))
    assert all(isinstance(e.event, PrefillsHere) for e in decoder.step().events[:2])
    decoder.submit(Open(0, 3, SequenceSpec("c", (9,), Sampling()), KvSource.HERE))
    answers = [e.event for e in decoder.step().events if e.handle == 3]
    assert isinstance(answers[0], Deferred)
    decoder.submit(Abort(0, 1))
    decoder.submit(Open(0, 4, SequenceSpec("d", (9,), Sampling()), KvSource.HERE))
    answers = [e.event for e in decoder.step().events if e.handle == 4]
    assert isinstance(answers[0], PrefillsHere)
