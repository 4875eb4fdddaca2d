"""The core of a prefill worker alone: what it sends, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from baton.commands import Abort, Resume
from baton.errors import Cancelled, EngineFault, HandoffFailed, PeerMismatch
from baton.events import Failed, HandedOff, NotHandedOff, Prefilled, Tokens
from baton.types import KvSource, Sample, Sampling, SequenceSpec
from engine.interface import Batch, LayersDone
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from engine.kv.range import KvRange
from engine.oracle import OracleEngine, OracleOptions, oracle_tokens
from kv_transfer.sender import SendDone
from kv_transfer.ticket import parse_ticket
from kv_transfer.ticket_table import TicketTable
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.recording_sender import RecordingSender
from tests.support.sim_tiers import EagerFetches, SimPrefill, sim_matchers
from worker_core.admission import CoreLimits
from worker_core.commands import Destination, Open, StreamCommand
from worker_core.core import CoreDeps, WorkerCore
from worker_core.costs import Costs
from worker_core.policy import prefill_policy
from worker_core.swap import no_swap

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
    costs: Costs | None = None,
    beat: Callable[[int], None] = lambda _num_tokens: None,
) -> WorkerCore:
    policy = prefill_policy()
    deps = CoreDeps(
        engine=engine,
        pool=pool or BlockPool(64, whole_blocks(4), secret=bytes(32)),
        tickets=tickets or SimPrefill(LoopbackHub(), lambda: 0.0).tickets,
        sender=sender,
        swap=no_swap(engine.kv),
        matchers=sim_matchers(),
        costs=costs or Costs(policy.local_prefill, token_bytes=128),
        clock=lambda: 0.0,
        beat=beat,
    )
    return WorkerCore(deps, CoreLimits(8, budget), policy)


def open_(handle: int, spec: SequenceSpec, num_held_tokens: int = 0) -> Open:
    """A prompt that is born with a destination."""
    return Open(0, handle, spec, KvSource.LOCAL, Destination(num_held_tokens))


def test_every_token_and_layer_is_sent_once_even_if_a_step_fails_after_it_was_sent() -> None:
    sender = RecordingSender()
    core = core_of(LateFault(OracleOptions(num_blocks=64, block_size=4)), sender, 64)
    opens = [
        open_(1, spec_of("a", 10)),
        open_(2, spec_of("b", 9, last=666)),
        open_(3, spec_of("c", 6), num_held_tokens=4),
    ]
    events = core.step(opens).events
    assert {e.handle for e in events if isinstance(e.event, Prefilled)} == {1, 3}
    assert {e.handle for e in events if isinstance(e.event, Failed)} == {2}
    assert sender.committed == [(0, 1), (0, 3)]
    assert sender.aborted == [(0, 2)]
    expected = [((0, 1), token, layer) for token in range(10) for layer in range(NUM_LAYERS)]
    expected += [((0, 3), token, layer) for token in range(4, 6) for layer in range(NUM_LAYERS)]
    assert sorted(entry for entry in sender.sent if entry[0] != (0, 2)) == sorted(expected)


def test_chunks_are_sent_as_they_are_computed() -> None:
    sender = RecordingSender()
    core = core_of(OracleEngine(OracleOptions(num_blocks=64, block_size=4)), sender, 4)
    sent_after_step = []
    commands = [open_(1, spec_of("a", 10))]
    while not sender.committed:
        core.step(commands)
        commands = []
        sent_after_step.append(len(sender.sent) // NUM_LAYERS)
    assert sent_after_step == [4, 8, 10]


def test_blocks_that_a_fetch_may_still_write_stay_leased_after_the_sender_had_its_last_word() -> (
    None
):
    sender, pool = RecordingSender(), BlockPool(64, whole_blocks(4), secret=bytes(32))
    worker = SimPrefill(LoopbackHub(), lambda: 0.0)
    engine = OracleEngine(OracleOptions(num_blocks=64, block_size=4))
    core = core_of(
        engine, sender, 64, pool=pool, tickets=worker.tickets, costs=EagerFetches(min_tokens=1)
    )
    core.step([open_(1, spec_of("a", 10), num_held_tokens=8)])
    assert worker.tickets.begin(sender.fetched[0], connection=1) is None
    ticket = parse_ticket(sender.fetched[0])
    piece = KvRange(0, 8, 0, NUM_LAYERS)
    assert isinstance(worker.tickets.pin(ticket.ticket_id, ticket.epoch, 1, piece), tuple)

    core.step([StreamCommand(0, 1, Abort())])
    core.step([SendDone((0, 1), Cancelled("given up"), 0)])
    assert pool.counts().leased == 3
    assert not worker.inbox

    worker.tickets.unpin(ticket.ticket_id, 1, checksum=0, num_bytes=0)
    core.step(worker.inbox)
    assert pool.counts().leased == 0


def new_core(sender: RecordingSender) -> WorkerCore:
    return core_of(OracleEngine(OracleOptions(num_blocks=64, block_size=4)), sender, 64)


def test_the_end_of_a_handoff_is_reported_after_the_first_token() -> None:
    core = new_core(RecordingSender())
    events = core.step([open_(handle, spec_of(f"r{handle}", 9)) for handle in (1, 2, 3)]).events
    assert sum(isinstance(event.event, Prefilled) for event in events) == 3
    ends = core.step(
        [
            SendDone((0, 1), None, 100),
            SendDone((0, 2), HandoffFailed("refused"), 0),
            SendDone((0, 3), PeerMismatch.of("d0", "kv_secret", "this", "that"), 0),
        ]
    ).events
    assert [event.handle for event in ends] == [1, 2, 3]
    delivered, lost, mismatch = (event.event for event in ends)
    assert isinstance(delivered, HandedOff)
    assert isinstance(lost, NotHandedOff)
    assert isinstance(mismatch, NotHandedOff)
    assert lost.reason == mismatch.reason == HandoffFailed.reason, "others may do better"
    assert "kv_secret" in mismatch.message


def test_a_sequence_whose_handoff_failed_may_decode_on() -> None:
    """After its first token it is a sequence as any other, paused."""
    core = new_core(RecordingSender())
    spec = spec_of("a", 9)
    core.step([open_(1, spec)])
    core.step([SendDone((0, 1), HandoffFailed("refused"), 0)])
    assert not core.step([]).events
    tokens = [
        sample.token_id
        for events in (
            core.step([StreamCommand(0, 1, Resume())]).events,
            *(core.step([]).events for _ in range(9)),
        )
        for event in events
        if isinstance(event.event, Tokens)
        for sample in event.event.samples
    ]
    assert tokens == oracle_tokens(spec.prompt_token_ids, spec.sampling, 1000)[1:]


def test_a_sequence_of_several_choices_whose_handoff_failed_is_over() -> None:
    core = new_core(RecordingSender())
    core.step([open_(1, replace(spec_of("a", 9), num_choices=2))])
    (end,) = core.step([SendDone((0, 1), HandoffFailed("refused"), 0)]).events
    assert isinstance(end.event, Failed)
    assert end.event.is_retriable


def test_the_end_of_a_handoff_is_reported_to_a_choice_that_goes_on() -> None:
    """A gateway that has seen a choice end has no ear for its handle any more."""
    prompt = tuple(range(9))
    free = Sampling(temperature=0.9, seed=3, max_tokens=9)
    firsts = [oracle_tokens(prompt, free, 1000, choice)[0] for choice in (0, 1)]
    assert firsts[0] != firsts[1]
    for stop, handle in ((firsts[0], 2), (firsts[1], 1)):
        sampling = replace(free, stop_token_ids=frozenset({stop}))
        core = new_core(RecordingSender())
        core.step([open_(1, SequenceSpec("a", prompt, sampling, num_choices=2))])
        (end,) = core.step([SendDone((0, 1), None, 100)]).events
        assert isinstance(end.event, HandedOff)
        assert end.handle == handle


def test_a_handoff_that_ends_before_its_prompt_is_here() -> None:
    """The ticket is presented first: a peer that refuses it may be known before the engine's thread
    knows the prompt."""
    core = new_core(RecordingSender())
    assert core.step([SendDone((0, 1), HandoffFailed("refused"), 0)]).events == []
    (event,) = core.step([open_(1, spec_of("a", 9))]).events
    assert isinstance(event.event, Failed)
    assert core.step([]).load.num_open_tickets == 0


def test_a_refused_prompt_gives_its_ticket_up() -> None:
    sender = RecordingSender()
    core = new_core(sender)
    step = core.step([open_(1, spec_of("a", 9, last=10**6))])
    assert [type(event.event) for event in step.events] == [Failed]
    assert sender.aborted == [(0, 1)]
    assert step.load.num_open_tickets == 1
    step = core.step([SendDone((0, 1), HandoffFailed("given up"), 0)])
    assert step.load.num_open_tickets == 0


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
    commands = [open_(1, spec_of("a", 10))]
    for num_tokens in (4, 4, 2):
        beats.clear()
        core.step(commands)
        commands = []
        assert before.pop() == [num_tokens]
        assert len(beats) > 1
        assert set(beats) == {num_tokens}
