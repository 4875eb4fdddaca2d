"""The core of a prefill worker alone: which prompts begin, what of them is found here already, and
what is learned from their steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.commands import Abort
from baton.errors import HandoffFailed
from baton.events import Failed, LocalPrefill, Prefilled, Tokens
from baton.types import FinishReason, KvSource, Sampling, SequenceSpec
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from engine.oracle import OracleEngine, OracleOptions
from kv_transfer.sender import SendDone
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.recording_sender import RecordingSender
from tests.support.sim_tiers import EagerFetches, SimPrefill, sim_matchers
from worker_core.admission import CoreLimits
from worker_core.commands import Command, Destination, Open, StreamCommand, StreamEvent
from worker_core.core import CoreDeps, WorkerCore
from worker_core.costs import Costs
from worker_core.policy import prefill_policy
from worker_core.swap import no_swap

BLOCK_SIZE, MAX_MODEL_LEN = 4, 24


@dataclass
class CountingSender(RecordingSender):
    num_heartbeats: int = 0

    def heartbeat(self) -> None:
        self.num_heartbeats += 1


@dataclass
class Worker:
    """A prefill worker with a clock that advances by a second at each reading."""

    num_blocks: int = 64
    max_num_seqs: int = 8
    costs: Costs = field(default_factory=lambda: costs_of(Costs))
    now_s: float = 0.0

    def __post_init__(self) -> None:
        options = OracleOptions(self.num_blocks, BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
        self.pool = BlockPool(self.num_blocks, whole_blocks(BLOCK_SIZE), secret=bytes(32))
        self.sender = CountingSender()
        engine = OracleEngine(options)
        deps = CoreDeps(
            engine=engine,
            pool=self.pool,
            tickets=SimPrefill(LoopbackHub(), lambda: 0.0).tickets,
            sender=self.sender,
            swap=no_swap(engine.kv),
            matchers=sim_matchers(),
            costs=self.costs,
            clock=self.clock,
        )
        self.core = WorkerCore(deps, CoreLimits(self.max_num_seqs, 64), prefill_policy())

    def clock(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def step(self, *commands: Command) -> list[StreamEvent]:
        """Events but the answers to what was opened."""
        events = self.core.step(list(commands)).events
        return [event for event in events if not isinstance(event.event, LocalPrefill)]


def costs_of(kind: type[Costs]) -> Costs:
    return kind(prefill_policy().local_prefill, token_bytes=128)


def open_(handle: int, num_tokens: int = 10, *, arrival_ns: int = 0, num_held: int = 0) -> Open:
    """A prompt that begins like all others, with a destination."""
    prompt = tuple(range(num_tokens))
    spec = SequenceSpec(f"r{handle}", prompt, Sampling(max_tokens=9), arrival_ns=arrival_ns)
    return Open(0, handle, spec, KvSource.LOCAL, Destination(num_held))


def cached_tokens(events: list[StreamEvent]) -> int:
    done = events[0].event
    assert isinstance(done, Prefilled)
    return done.num_cached_tokens


def test_memory_for_one_prompt_is_the_best_ranked_ones() -> None:
    worker = Worker(num_blocks=3)
    events = worker.step(open_(1, arrival_ns=2), open_(2, arrival_ns=1))
    assert {event.handle for event in events} == {2}


def test_what_one_prompt_computed_the_next_one_finds() -> None:
    worker = Worker()
    assert cached_tokens(worker.step(open_(1))) == 0
    assert cached_tokens(worker.step(open_(2))) == 8


def test_a_prompt_whose_every_token_is_scored_is_computed_whole() -> None:
    worker = Worker()
    worker.step(open_(1))
    asked = open_(2)
    sampling = Sampling(max_tokens=9, prompt_logprobs=1)
    scored = replace(asked, spec=replace(asked.spec, sampling=sampling))
    assert cached_tokens(worker.step(scored)) == 0


def test_a_prompt_that_fetches_a_prefix_has_a_place() -> None:
    worker = Worker(max_num_seqs=1, costs=EagerFetches(min_tokens=1))
    assert worker.step(open_(1, num_held=8)) == []
    assert worker.step(open_(2, arrival_ns=1)) == []
    assert worker.pool.counts().leased == 3, "nothing of the second"


def test_a_key_is_new_once_its_handoff_has_ended() -> None:
    worker = Worker()
    worker.step(SendDone((0, 1), HandoffFailed("refused"), 0))
    assert isinstance(worker.step(open_(1))[0].event, Failed)
    assert isinstance(worker.step(open_(1))[0].event, Prefilled)


def test_a_prompt_that_waits_for_blocks_is_given_up_without_a_trace() -> None:
    worker = Worker(num_blocks=3)
    worker.step(open_(1, arrival_ns=1), open_(2, arrival_ns=2))
    worker.step(StreamCommand(0, 2, Abort()))
    assert worker.sender.aborted == [(0, 2)]
    worker.step(SendDone((0, 2), HandoffFailed("given up"), 0), SendDone((0, 1), None, 0))
    load = worker.core.step([]).load
    assert load.num_open_tickets == load.num_waiting == 0
    assert worker.pool.counts().leased == 0


def test_a_queued_prompt_whose_handoff_fails_is_reported() -> None:
    worker = Worker(num_blocks=3)
    worker.step(open_(1, arrival_ns=1), open_(2, arrival_ns=2))
    (event,) = worker.step(SendDone((0, 2), HandoffFailed("refused"), 0))
    assert event.handle == 2
    assert isinstance(event.event, Failed)
    assert event.event.is_retriable


def test_what_was_given_up_is_given_up_once() -> None:
    worker = Worker()
    worker.step(open_(1))
    worker.step(StreamCommand(0, 1, Abort()))
    worker.step(SendDone((0, 1), HandoffFailed("given up"), 0))
    worker.step(StreamCommand(0, 1, Abort()))
    assert worker.sender.aborted == [(0, 1)]


def test_a_prompt_that_leaves_room_for_one_token_has_it_as_its_last() -> None:
    for num_tokens, finish in (
        (MAX_MODEL_LEN - 2, FinishReason.NONE),
        (MAX_MODEL_LEN - 1, FinishReason.LENGTH),
    ):
        _, first = Worker().step(open_(1, num_tokens))
        assert isinstance(first.event, Tokens)
        assert first.event.finish is finish


def test_steps_show_life_and_how_long_computing_takes() -> None:
    seen: list[tuple[int, float]] = []

    class Watched(Costs):
        def observe_step(
            self, num_decode_tokens: int, num_prefill_tokens: int, seconds: float
        ) -> None:
            assert not num_decode_tokens
            seen.append((num_prefill_tokens, seconds))

    worker = Worker(costs=costs_of(Watched))
    worker.step(open_(1))
    assert [num_tokens for num_tokens, _ in seen] == [10]
    assert seen[0][1] > 0
    # One for the step, and one for each of its two groups of layers.
    assert worker.sender.num_heartbeats == 3
