"""The prefill core alone: which prompts begin, what of them is found here already, and what is learned from their steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.cache.pool import BlockPool
from baton.engine.oracle import OracleEngine, OracleOptions
from baton.errors import HandoffFailed
from baton.types import FinishReason, Sampling, SequenceSpec
from kv_transfer.sender import SendDone
from kv_transfer.transport.loopback import LoopbackHub
from prefill_svc.borrowing import BorrowCosts
from prefill_svc.commands import Abort, Prefilled, PrefillEvent, PrefillFailed, Submit
from prefill_svc.core import PrefillCore, PrefillDevices, PrefillLimits
from tests.support.recording_sender import RecordingSender
from tests.support.sim_tiers import EagerBorrower, SimPrefill, sim_matchers

BLOCK_SIZE, MAX_MODEL_LEN = 4, 24


@dataclass
class CountingSender(RecordingSender):
    num_heartbeats: int = 0

    def heartbeat(self) -> None:
        self.num_heartbeats += 1


@dataclass
class Worker:
    """A prefill worker whose clock goes on by a second at each look."""

    num_blocks: int = 64
    max_num_seqs: int = 8
    costs: BorrowCosts = field(default_factory=lambda: BorrowCosts(token_bytes=128))
    now_s: float = 0.0

    def __post_init__(self) -> None:
        options = OracleOptions(self.num_blocks, BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
        self.pool = BlockPool(self.num_blocks, BLOCK_SIZE, secret=bytes(32))
        self.sender = CountingSender()
        devices = PrefillDevices(
            OracleEngine(options),
            self.pool,
            self.sender,
            SimPrefill(LoopbackHub(), lambda: 0.0).tickets,
            self.costs,
            sim_matchers(),
            self.clock,
        )
        self.core = PrefillCore(devices, PrefillLimits(self.max_num_seqs, 64))

    def clock(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def step(self, *commands: Submit | Abort | SendDone) -> list[PrefillEvent]:
        return self.core.step(list(commands)).events


def submit(name: str, num_tokens: int = 10, *, arrival_ns: int = 0, num_held: int = 0) -> Submit:
    """A prompt that begins like all others."""
    prompt = tuple(range(num_tokens))
    spec = SequenceSpec(name, prompt, Sampling(max_tokens=9), arrival_ns=arrival_ns)
    return Submit(name, spec, b"t", num_held)


def cached_tokens(events: list[PrefillEvent]) -> int:
    (done,) = events
    assert isinstance(done, Prefilled)
    return done.num_cached_tokens


def test_memory_for_one_prompt_is_the_best_ranked_ones() -> None:
    worker = Worker(num_blocks=3)
    events = worker.step(submit("late", arrival_ns=2), submit("early", arrival_ns=1))
    assert [event.key for event in events] == ["early"]


def test_what_one_prompt_computed_the_next_one_finds() -> None:
    worker = Worker()
    assert cached_tokens(worker.step(submit("a"))) == 0
    assert cached_tokens(worker.step(submit("b"))) == 8


def test_a_prompt_whose_every_token_is_scored_is_computed_whole() -> None:
    worker = Worker()
    worker.step(submit("a"))
    asked = submit("b")
    sampling = Sampling(max_tokens=9, prompt_logprobs=1)
    scored = replace(asked, spec=replace(asked.spec, sampling=sampling))
    assert cached_tokens(worker.step(scored)) == 0


def test_a_prompt_that_borrows_has_a_place() -> None:
    worker = Worker(max_num_seqs=1, costs=EagerBorrower(min_tokens=1))
    assert worker.step(submit("a", num_held=8)) == []
    assert worker.step(submit("b", arrival_ns=1)) == []
    assert worker.pool.counts().leased == 3, "nothing of the second"


def test_a_key_is_new_once_its_handoff_has_ended() -> None:
    worker = Worker()
    worker.step(SendDone("a", HandoffFailed("refused"), 0))
    assert isinstance(worker.step(submit("a"))[0], PrefillFailed)
    assert isinstance(worker.step(submit("a"))[0], Prefilled)


def test_what_was_given_up_is_given_up_once() -> None:
    worker = Worker()
    worker.step(submit("a"))
    worker.step(Abort("a"))
    worker.step(Abort("a"))
    assert worker.sender.aborted == ["a"]


def test_a_prompt_that_leaves_room_for_one_token_has_it_as_its_last() -> None:
    for num_tokens, finish in (
        (MAX_MODEL_LEN - 2, FinishReason.NONE),
        (MAX_MODEL_LEN - 1, FinishReason.LENGTH),
    ):
        (done,) = Worker().step(submit("a", num_tokens))
        assert isinstance(done, Prefilled)
        assert done.firsts[0].finish is finish


def test_steps_show_life_and_tell_what_computing_takes() -> None:
    seen: list[tuple[int, float]] = []

    class Costs(BorrowCosts):
        def observe_step(self, num_tokens: int, seconds: float) -> None:
            seen.append((num_tokens, seconds))

    worker = Worker(costs=Costs(token_bytes=128))
    worker.step(submit("a"))
    assert [num_tokens for num_tokens, _ in seen] == [10]
    assert seen[0][1] > 0
    # Of the step, and of each of its two groups of layers.
    assert worker.sender.num_heartbeats == 3
