"""What a decode worker does with the KV of sequences that must wait, and what it learns from it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue

import numpy as np
import pytest

from baton.types import Sampling, SequenceSpec
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from engine.kv.tensors.array import ArrayKvPool
from engine.kv.tiers.runner import InlineRunner, Runner, ThreadRunner
from engine.oracle import OracleEngine, OracleOptions
from kv_transfer.ticket import ParkedChunk
from tests.support.recording_sender import RecordingSender
from worker_core.costs import Costs
from worker_core.handoff import Handoffs
from worker_core.itl_budget import KeepPercentile
from worker_core.policy import LocalPrefillPolicy
from worker_core.preemption import Preemption
from worker_core.sequence import Stage, WorkerSequence
from worker_core.state import CoreState
from worker_core.swap import SwapDone, SwapSpace

BLOCK_SIZE, NUM_TOKENS = 4, 10


@dataclass
class Worker:
    """A decode worker's memory with prompts that take 2 s to recompute; readings of the clock are
    `tick_s` apart."""

    tick_s: float = 0.0
    num_blocks: int = 12
    runner: Runner = field(default_factory=InlineRunner)
    costs: Costs = field(
        default_factory=lambda: Costs(
            LocalPrefillPolicy(0, 0, is_pinned=False, gap_rule=KeepPercentile(2.0)), 128
        )
    )

    def __post_init__(self) -> None:
        self.engine = OracleEngine(OracleOptions(num_blocks=self.num_blocks, block_size=BLOCK_SIZE))
        self.pool = BlockPool(self.num_blocks, whole_blocks(BLOCK_SIZE), secret=bytes(32))
        self.done: list[SwapDone] = []
        self.swap = SwapSpace(self.engine.kv, 1 << 20, self.runner, self.done.append, self.clock())
        self.state = CoreState(self.engine.spec, self.pool, self.swap, self.clock())
        handoffs = Handoffs(self.state, RecordingSender())
        self.preemption = Preemption(self.state, self.costs, handoffs)
        self.costs.handoff.observe(NUM_TOKENS, 2.0)

    def report(self) -> None:
        """As commands of the next step."""
        while self.done:
            self.preemption.on_copied(self.done.pop(0))

    def preempt(self, sequence: WorkerSequence) -> None:
        self.preemption.preempt(sequence)
        self.report()

    def clock(self) -> Callable[[], float]:
        looks = count()
        return lambda: next(looks) * self.tick_s

    def run(self, handle: int, priority: int = 0) -> WorkerSequence:
        """A sequence with all of its KV here."""
        prompt = tuple(range(100 * handle, 100 * handle + NUM_TOKENS))
        spec = SequenceSpec(f"r{handle}", prompt, Sampling(), priority=priority, arrival_ns=handle)
        lease = self.pool.lease(b"", prompt, NUM_TOKENS)
        assert lease is not None
        sequence = WorkerSequence(0, handle, spec, lease, Stage.RUNNING, NUM_TOKENS)
        self.state.put(sequence)
        return sequence


def test_a_copy_that_took_longer_than_computing_is_the_last() -> None:
    worker = Worker(tick_s=5.0)
    first, second = worker.run(1), worker.run(2)
    worker.preempt(first)
    assert first.stage is Stage.SWAPPED
    worker.preempt(second)
    assert list(worker.state.groups.values()) == [first]


def test_kv_that_waits_in_host_memory_is_still_found_as_a_prefix() -> None:
    worker = Worker()
    sequence = worker.run(1)
    worker.preempt(sequence)
    num_whole = NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    assert worker.pool.num_cached_tokens(b"", sequence.token_ids) == num_whole
    worker.pool.check_integrity()


def test_what_comes_back_writes_no_block_that_holds_its_kv_already() -> None:
    """Others may share such blocks, and read them now."""
    worker = Worker()
    assert isinstance(worker.engine.kv, ArrayKvPool)
    kv = worker.engine.kv.data
    kv[...] = np.arange(kv.size).reshape(kv.shape)
    worker.swap.copy_out("k", (0, 1, 2), NUM_TOKENS)
    before = kv.copy()
    kv[...] = -1
    worker.swap.copy_in("k", (5, 6, 7), BLOCK_SIZE)
    worker.swap.drop("k")
    assert (kv[5] == -1).all()
    assert (kv[6] == before[1]).all()
    in_last = NUM_TOKENS % BLOCK_SIZE
    assert (kv[7, :, :, :, :in_last] == before[2, :, :, :, :in_last]).all()
    assert (kv[7, :, :, :, in_last:] == -1).all()
    assert worker.swap.is_empty
    assert worker.swap.num_bytes == 0


def test_only_what_was_copied_says_how_fast_copies_are() -> None:
    """KV that arrived before its blocks is not copied out, and takes room all the same."""
    worker = Worker(tick_s=1.0)
    swap, chunk = worker.swap, ParkedChunk(4, 999, lambda _: None)
    one_block = swap.num_bytes_of(BLOCK_SIZE)
    for num_held, num_bytes in ((BLOCK_SIZE, one_block), (0, 0)):
        sequence = worker.run(10 + num_held)
        swap.reserve(sequence.key, NUM_TOKENS)
        swap.arrive(sequence.key, (chunk,))
        sequence.stage, sequence.is_copying = Stage.COPYING, True
        swap.copy_out(sequence.key, sequence.lease.block_ids, num_held)
        assert swap.num_bytes == num_bytes + chunk.num_bytes
        assert worker.done[-1].num_bytes == num_bytes
        worker.report()
        assert sequence.stage is Stage.SWAPPED
        swap.drop(sequence.key)
        assert swap.num_bytes == 0
    assert worker.costs.copy.num_observations == 1
    assert worker.costs.copy.rate == pytest.approx(1.0 / one_block)


def test_copies_run_in_a_thread_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    kv, done, names = worker.engine.kv, SimpleQueue[SwapDone](), set[str]()
    runner = ThreadRunner("kv-swap", lambda error: pytest.fail(repr(error)))
    swap = SwapSpace(kv, 1 << 20, runner, done.put, lambda: 0.0)
    for name in ("pack", "unpack"):
        move = getattr(kv, name)

        def spy(*place: object, move: Callable[..., None] = move) -> None:
            names.add(threading.current_thread().name)
            move(*place)

        monkeypatch.setattr(kv, name, spy)
    swap.copy_out("k", (0, 1, 2), NUM_TOKENS)
    assert done.get(timeout=60).is_out
    swap.copy_in("k", (5, 6, 7), 0)
    assert not done.get(timeout=60).is_out
    swap.close()
    assert names == {"kv-swap"}


def test_a_negative_priority_takes_nobodys_blocks_and_a_positive_one_gives_way() -> None:
    """Workers serve all accounts side by side, and anybody may give a priority."""
    worker = Worker()
    yielding, early, pushing = worker.run(1, 1), worker.run(2), worker.run(3, -1000)
    # Blocks are taken from the last of these.
    assert worker.state.in_stage(Stage.RUNNING) == [early, pushing, yielding]


def test_nobody_comes_back_before_all_that_run_can_grow() -> None:
    worker = Worker(num_blocks=7)
    running, waiting = worker.run(1), worker.run(2)
    worker.preempt(waiting)
    filler = worker.pool.lease(b"", (7,), 1)
    assert filler is not None
    # 3 blocks are left, which is what it has, and none for the one that runs.
    assert worker.pool.num_available == 3
    assert not worker.preemption.bring_back()
    filler.release()
    assert worker.preemption.bring_back()
    worker.report()
    assert waiting.stage is Stage.RUNNING
    assert running.stage is Stage.RUNNING
    worker.pool.check_integrity()
