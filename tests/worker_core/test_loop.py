"""The engine loop: commands in, steps out, and a heartbeat that tells a long step from a stuck
one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from baton.types import KvSource, Sample, Sampling, SequenceSpec, WorkerLoad
from engine.interface import Batch, LayersDone
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from engine.oracle import OracleEngine, OracleOptions
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.sim_tiers import SimDecode, sim_matchers
from worker_core.admission import CoreLimits
from worker_core.commands import Open
from worker_core.core import CoreDeps, WorkerCore
from worker_core.itl_budget import KeepPercentile
from worker_core.loop import EngineLoop, Heartbeat, StepResult
from worker_core.policy import LocalPrefillPolicy, decode_policy
from worker_core.swap import no_swap


@dataclass
class EchoCore:
    """Gives each command back as an event of the step, and those below zero at once. `on_step` runs
    first in a step, in the loop's thread."""

    on_step: Callable[[Sequence[int]], None] = lambda _: None
    num_steps: int = field(default=0, init=False)
    taken: Sequence[int] = field(default=(), init=False)

    def take(self, commands: Sequence[int]) -> Sequence[int]:
        self.taken = [command for command in commands if command >= 0]
        return [command for command in commands if command < 0]

    def compute(self) -> StepResult[int]:
        self.on_step(self.taken)
        self.num_steps += bool(self.taken)
        return StepResult(self.taken, WorkerLoad(num_steps=self.num_steps), is_idle=True)


def loop_over(
    core: EchoCore, deliver: Callable[[Sequence[int], WorkerLoad | None], None], **options: int
) -> EngineLoop[int, int]:
    return EngineLoop(core, deliver, Heartbeat(1.5), name="test-engine", **options)


async def test_what_follows_from_commands_alone_does_not_wait_for_the_step() -> None:
    told, may_end = asyncio.Event(), threading.Event()

    def on_step(commands: Sequence[int]) -> None:
        if commands:
            assert may_end.wait(60)

    def deliver(events: Sequence[int], load: WorkerLoad | None) -> None:
        if events == [-1]:
            assert load is None
            told.set()

    loop = loop_over(EchoCore(on_step), deliver)
    loop.submit(-1)
    loop.submit(1)
    loop.start()
    await asyncio.wait_for(told.wait(), 60)
    may_end.set()
    await loop.stop()


async def test_every_command_is_taken_once_and_in_order() -> None:
    seen: list[int] = []
    whole = asyncio.Event()

    def deliver(events: Sequence[int], load: WorkerLoad | None) -> None:
        del load
        seen.extend(events)
        if len(seen) == 1000:
            whole.set()

    loop = loop_over(EchoCore(), deliver)
    loop.start()
    for command in range(1000):
        loop.submit(command)
    await whole.wait()
    await loop.stop()
    assert seen == list(range(1000))
    assert not loop._thread.is_alive()
    assert loop.ended.is_set()


async def test_a_full_inbox_has_no_room_for_new_work_and_loses_no_command() -> None:
    stepping, release = threading.Event(), threading.Event()
    seen: list[int] = []
    whole = asyncio.Event()

    def block(commands: Sequence[int]) -> None:
        if commands:
            stepping.set()
            release.wait()

    def deliver(events: Sequence[int], load: WorkerLoad | None) -> None:
        del load
        seen.extend(events)
        if len(seen) == 6:
            whole.set()

    loop = loop_over(EchoCore(block), deliver, max_num_commands=3)
    loop.start()
    loop.submit(0)
    await asyncio.to_thread(stepping.wait)
    had_room = []
    for command in range(1, 6):
        had_room.append(loop.has_room())
        loop.submit(command)
    release.set()
    await whole.wait()
    await loop.stop()
    assert had_room == [True, True, True, False, False]
    assert seen == list(range(6))
    assert loop.has_room()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_core_that_fails_ends_the_loop_and_says_so() -> None:
    def fail(commands: Sequence[int]) -> None:
        if commands:
            raise RuntimeError("a fault of ours")

    loop = loop_over(EchoCore(fail), lambda _events, _load: None)
    loop.start()
    loop.submit(1)
    await loop.ended.wait()
    await loop.stop()
    assert not loop._thread.is_alive()


class CountingEngine(OracleEngine):
    """Notes how often the core showed a sign of life within a forward."""

    def __init__(self, beats: list[int]) -> None:
        super().__init__(OracleOptions(num_blocks=16, num_layers=8, layer_group_size=2))
        self.beats = beats
        self.num_beats_within: list[int] = []

    def forward(
        self, batch: Batch, layers_done: LayersDone | None = None
    ) -> tuple[tuple[Sample, ...], ...]:
        before = len(self.beats)
        samples = super().forward(batch, layers_done)
        self.num_beats_within.append(len(self.beats) - before)
        return samples


def test_a_long_step_beats_at_every_group_of_layers() -> None:
    beats: list[int] = []
    engine = CountingEngine(beats)
    sim = SimDecode(LoopbackHub(), lambda: 0.0)
    pool = BlockPool(16, whole_blocks(16), secret=bytes(32))
    swap = no_swap(engine.kv)
    devices = CoreDeps(
        engine,
        pool,
        sim.tickets,
        sim.sender,
        swap,
        sim_matchers(),
        lambda: 0.0,
        beats.append,
    )
    core = WorkerCore(
        devices,
        CoreLimits(4, 64),
        decode_policy(LocalPrefillPolicy(0, 0, True, KeepPercentile(2.0))),
    )
    core.step([Open(0, 1, SequenceSpec("r", (1, 2, 3), Sampling(max_tokens=2)), KvSource.LOCAL)])
    assert engine.num_beats_within == [4]


def test_an_age_is_not_negative_when_the_loop_beats_while_it_is_read() -> None:
    now_s = 10.0
    beats = 0

    def clock() -> float:
        """The engine's thread beats a little later than the reader has read the clock."""
        nonlocal now_s, beats
        seen_s = now_s
        if beats == 1:
            beats = 2
            now_s += 0.01
            heartbeat.beat()
        return seen_s

    heartbeat = Heartbeat(1.5, clock)
    beats = 1
    assert heartbeat.age_s >= 0
    assert beats == 2
