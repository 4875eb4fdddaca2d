"""The prefill core alone: what it sends, and when."""

from __future__ import annotations

from collections.abc import Callable

from baton.cache.pool import BlockPool
from baton.engine.interface import Batch, LayersDone
from baton.engine.kv_range import KvRange
from baton.engine.oracle import OracleEngine, OracleOptions
from baton.errors import Cancelled, EngineFault, HandoffFailed, PeerMismatch
from baton.types import Sample, Sampling, SequenceSpec
from kv_transfer.kv_ticket import KvTicket
from kv_transfer.sender import SendDone
from kv_transfer.ticket_table import TicketTable
from kv_transfer.transport.loopback import LoopbackHub
from prefill_svc.borrowing import BorrowCosts
from prefill_svc.commands import (
    Abort,
    HandoffEnded,
    Prefilled,
    PrefillFailed,
    Submit,
)
from prefill_svc.core import (
    PrefillCore,
    PrefillDevices,
    PrefillLimits,
)
from tests.support.recording_sender import RecordingSender
from tests.support.sim_tiers import EagerBorrower, SimPrefill, sim_matchers

NUM_LAYERS = 4


class LateFault(OracleEngine):
    """Fails after all layers were told, if the batch holds several slices or the token 666."""

    def forward(
        self, batch: Batch, layers_done: LayersDone | None = None
    ) -> tuple[tuple[Sample, ...], ...]:
        samples = super().forward(batch, layers_done)
        if len(batch.slices) > 1 or any(666 in part.token_ids for part in batch.slices):
            raise EngineFault("late")
        return samples


def spec_of(name: str, num_tokens: int, last: int = 7) -> SequenceSpec:
    return SequenceSpec(name, (*range(num_tokens - 1), last), Sampling(max_tokens=9))


def core_of(
    engine: OracleEngine,
    sender: RecordingSender,
    budget: int,
    *,
    pool: BlockPool | None = None,
    tickets: TicketTable | None = None,
    costs: BorrowCosts | None = None,
    beat: Callable[[int], None] = lambda _num_tokens: None,
) -> PrefillCore:
    pool = pool or BlockPool(64, 4, secret=bytes(32))
    tickets = tickets or SimPrefill(LoopbackHub(), lambda: 0.0).tickets
    costs = costs or BorrowCosts(token_bytes=128)
    devices = PrefillDevices(
        engine, pool, sender, tickets, costs, sim_matchers(), lambda: 0.0, beat
    )
    return PrefillCore(devices, PrefillLimits(8, budget))


def test_every_token_and_layer_is_sent_once_even_if_a_step_fails_after_it_was_sent() -> None:
    sender = RecordingSender()
    core = core_of(LateFault(OracleOptions(num_blocks=64, block_size=4)), sender, 64)
    submits = [
        Submit("a", spec_of("a", 10), b"t", 0),
        Submit("b", spec_of("b", 9, last=666), b"t", 0),
        Submit("c", spec_of("c", 6), b"t", 4),
    ]
    events = core.step(submits).events
    assert {e.key for e in events if isinstance(e, Prefilled)} == {"a", "c"}
    assert {e.key for e in events if isinstance(e, PrefillFailed)} == {"b"}
    assert sender.committed == ["a", "c"]
    assert sender.aborted == ["b"]
    expected = [("a", token, layer) for token in range(10) for layer in range(NUM_LAYERS)]
    expected += [("c", token, layer) for token in range(4, 6) for layer in range(NUM_LAYERS)]
    assert sorted(entry for entry in sender.sent if entry[0] != "b") == sorted(expected)


def test_chunks_are_sent_as_they_are_computed() -> None:
    sender = RecordingSender()
    core = core_of(OracleEngine(OracleOptions(num_blocks=64, block_size=4)), sender, 4)
    sent_after_step = []
    commands = [Submit("a", spec_of("a", 10), b"t", 0)]
    while not sender.committed:
        core.step(commands)
        commands = []
        sent_after_step.append(len(sender.sent) // NUM_LAYERS)
    assert sent_after_step == [4, 8, 10]


def test_blocks_that_a_lender_may_still_write_stay_leased_after_the_sender_had_its_last_word() -> (
    None
):
    sender, pool = RecordingSender(), BlockPool(64, 4, secret=bytes(32))
    lender = SimPrefill(LoopbackHub(), lambda: 0.0)
    engine = OracleEngine(OracleOptions(num_blocks=64, block_size=4))
    core = core_of(
        engine, sender, 64, pool=pool, tickets=lender.tickets, costs=EagerBorrower(min_tokens=1)
    )
    core.step([Submit("a", spec_of("a", 10), b"t", 8)])
    ticket = lender.tickets.begin(sender.borrowed[0], connection=1)
    assert isinstance(ticket, KvTicket)
    piece = KvRange(0, 8, 0, NUM_LAYERS)
    assert isinstance(lender.tickets.pin(ticket.ticket_id, ticket.epoch, 1, piece), tuple)

    core.step([Abort("a")])
    core.step([SendDone("a", Cancelled("given up"), 0)])
    assert pool.counts().leased == 3
    assert not lender.inbox

    lender.tickets.unpin(ticket.ticket_id, checksum=0, num_bytes=0)
    core.step(lender.inbox)
    assert pool.counts().leased == 0


def new_core(sender: RecordingSender) -> PrefillCore:
    return core_of(OracleEngine(OracleOptions(num_blocks=64, block_size=4)), sender, 64)


def test_the_end_of_a_handoff_is_told_after_the_first_token() -> None:
    core = new_core(RecordingSender())
    names = ("delivered", "lost", "mismatch")
    assert len(core.step([Submit(name, spec_of(name, 9), b"t", 0) for name in names]).events) == 3
    ends = core.step(
        [
            SendDone("delivered", None, 100),
            SendDone("lost", HandoffFailed("refused"), 0),
            SendDone("mismatch", PeerMismatch.of("d0", "kv_secret", "this", "that"), 0),
        ]
    ).events
    assert [event.key for event in ends] == list(names)
    assert all(isinstance(event, HandoffEnded) for event in ends)
    errors = [event.error for event in ends if isinstance(event, HandoffEnded)]
    assert errors[0] is None
    assert all(isinstance(error, HandoffFailed) for error in errors[1:]), "others may do better"
    assert "kv_secret" in str(errors[2])


def test_a_handoff_that_ends_before_its_prompt_is_here() -> None:
    """The ticket is presented first: whom nobody takes it from may know so before the engine's thread knows the prompt."""
    core = new_core(RecordingSender())
    assert core.step([SendDone("a", HandoffFailed("refused"), 0)]).events == []
    (event,) = core.step([Submit("a", spec_of("a", 9), b"t", 0)]).events
    assert isinstance(event, PrefillFailed)
    assert core.step([]).load.num_open_tickets == 0


def test_a_refused_prompt_gives_its_ticket_up() -> None:
    sender = RecordingSender()
    core = new_core(sender)
    step = core.step([Submit("a", spec_of("a", 9, last=10**6), b"t", 0)])
    assert [type(event) for event in step.events] == [PrefillFailed]
    assert sender.aborted == ["a"]
    assert step.load.num_open_tickets == 1
    assert core.step([SendDone("a", HandoffFailed("given up"), 0)]).load.num_open_tickets == 0


def test_beats_before_a_step_and_within_tell_how_many_tokens_it_computes() -> None:
    beats: list[int] = []
    before: list[list[int]] = []

    class Watched(OracleEngine):
        def forward(
            self, batch: Batch, layers_done: LayersDone | None = None
        ) -> tuple[tuple[Sample, ...], ...]:
            before.append(list(beats))
            return super().forward(batch, layers_done)

    engine = Watched(OracleOptions(num_blocks=64, block_size=4))
    core = core_of(engine, RecordingSender(), 4, beat=beats.append)
    commands = [Submit("a", spec_of("a", 10), b"t", 0)]
    for num_tokens in (4, 4, 2):
        beats.clear()
        core.step(commands)
        commands = []
        assert before.pop() == [num_tokens]
        assert len(beats) > 1
        assert set(beats) == {num_tokens}
