"""Prompts that leave after their first token are launched one step ahead. Each sends and continues
as if alone, whatever fails, is cancelled or finds no room."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.commands import Abort
from baton.errors import BY_REASON
from baton.events import Failed, HandedOff, Preempted, Tokens
from baton.types import KvSource, Sample, Sampling, SequenceSpec
from engine.interface import Batch, Launched, LayersDone, SequenceSlice
from engine.kv.range import KvRange
from engine.oracle import OracleEngine, OracleOptions, oracle_tokens
from kv_transfer.send_connection import Cancel, Finish, LaterTask, Send, SendDone
from kv_transfer.sender import KvSender
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.sim_tiers import SimPrefill, SimShape
from tests.support.watched_launches import Watch, check_blocks_in_flight
from worker_core.commands import Destination, Open, StreamCommand

VOCAB = 1000
POISON = 777

#: KV sent of a sequence, by token and layer.
Kv = dict[tuple[int, int], bytes]


def rows_of(engine: OracleEngine, block_ids: tuple[int, ...], piece: KvRange) -> Kv:
    """What the blocks hold now."""
    rows = {}
    for token in range(piece.first_token, piece.end_token):
        for layer in range(piece.first_layer, piece.end_layer):
            row = memoryview(bytearray(engine.kv.layout.token_layer_bytes))
            engine.kv.pack(block_ids, KvRange(token, 1, layer, 1), row)
            rows[token, layer] = bytes(row)
    return rows


@dataclass
class EagerSender:
    """Reads KV as soon as it may, and is done with a handoff when it is to be finished."""

    worker: SimPrefill
    read: dict[Hashable, Kv] = field(default_factory=dict)
    cancelled: set[Hashable] = field(default_factory=set)

    def begin(self, key: Hashable, ticket: bytes, *others: LaterTask) -> int:
        raise NotImplementedError

    def submit(self, task: LaterTask) -> None:
        if task.key in self.cancelled:
            return
        match task:
            case Send(key, block_ids, piece):
                rows = rows_of(self.worker.engine, block_ids, piece)
                assert rows.keys().isdisjoint(self.read.setdefault(key, {})), "sent twice"
                self.read[key] |= rows
            case Finish(key):
                self.worker.submit(SendDone(key, None, 0))
            case Cancel(key, reason, message):
                self.cancelled.add(key)
                self.worker.submit(SendDone(key, BY_REASON[reason](message), 0))

    def heartbeat(self) -> None:
        pass


class Prefill(SimPrefill):
    """Without a destination's worker."""

    def core_sender(self) -> KvSender:
        self.eager = EagerSender(self)
        return self.eager


class World:
    """A prefill worker, and what it reported."""

    def __init__(self, shape: SimShape = SimShape(), fails: frozenset[int] = frozenset()) -> None:
        self.worker = Prefill(LoopbackHub(), lambda: 0.0, shape)
        self.watch = Watch(self.worker.engine, fails=fails)
        self.worker.engine.launch = self.watch.launch  # type: ignore[method-assign]
        self.specs: dict[int, SequenceSpec] = {}
        self.firsts: dict[int, int] = {}
        """By handle, which is the sequence's and its choice's."""
        self.ends: dict[int, str] = {}

    def open(self, spec: SequenceSpec) -> int:
        handle = 10 * len(self.specs)
        self.specs[handle] = spec
        self.worker.submit(Open(0, handle, spec, KvSource.LOCAL, Destination(0)))
        return handle

    def step(self) -> bool:
        """Whether it was idle."""
        step = self.worker.step()
        for emitted in step.events:
            match emitted.event:
                case Tokens(_, (sample,)):
                    self.firsts[emitted.handle] = sample.token_id
                case HandedOff():
                    self.ends[emitted.handle] = "handed off"
                case Failed(reason):
                    self.ends[emitted.handle] = reason
                case Preempted():
                    self.ends[emitted.handle] = "preempted"
        check_blocks_in_flight(self.worker.pool, self.watch.in_flight, self.worker.shape.num_stages)
        return step.is_idle

    def run(self) -> None:
        """To the end of all, after which nothing is held."""
        for _ in range(10_000):
            if self.step() and not self.worker.inbox:
                break
        assert self.worker.pool.counts().leased == 0
        assert not self.watch.in_flight

    def check(self, handle: int) -> None:
        """A prompt that was handed off left as it would alone."""
        spec = self.specs[handle]
        assert self.worker.eager.read[0, handle] == kv_alone(spec.prompt_token_ids)
        for choice in range(spec.num_choices):
            expected = oracle_tokens(spec.prompt_token_ids, spec.sampling, VOCAB, choice)
            assert self.firsts[handle + choice] == expected[0]


def kv_alone(prompt: tuple[int, ...]) -> Kv:
    """The KV of a prompt that nothing disturbs."""
    engine = OracleEngine(OracleOptions(num_blocks=64, block_size=4))
    blocks = tuple(range(-(-len(prompt) // 4)))
    engine.forward(Batch((SequenceSlice(prompt, 0, blocks, ()),)))
    return rows_of(engine, blocks, KvRange(0, len(prompt), 0, engine.spec.layout.num_layers))


def prompt_of(num_tokens: int, first: int = 0) -> SequenceSpec:
    return SequenceSpec(
        f"r{first}", tuple(range(first, first + num_tokens)), Sampling(max_tokens=9)
    )


def test_the_next_chunk_and_the_next_prompt_are_launched_before_the_one_before_is_collected() -> (
    None
):
    world = World(SimShape(max_num_batched_tokens=8))
    handles = [world.open(prompt_of(20)), world.open(prompt_of(9, first=500))]
    world.run()
    sizes = [[len(part.token_ids) for part in batch.slices] for batch in world.watch.launches]
    assert sizes == [[8], [8], [4, 4], [5]], "nothing is computed but prompts, once"
    assert world.watch.num_ahead == len(sizes) - 1
    assert all(world.ends[handle] == "handed off" for handle in handles)
    for handle in handles:
        world.check(handle)


@pytest.mark.parametrize(
    ("sampling", "num_choices"),
    [
        (Sampling(max_tokens=9, presence_penalty=1.5, bad_words=((19, 5),)), 1),
        (Sampling(max_tokens=9, temperature=0.9, seed=3), 3),
    ],
)
def test_what_a_first_token_depends_on_is_known_when_it_is_launched(
    sampling: Sampling, num_choices: int
) -> None:
    """So these run ahead here, as they cannot where they decode."""
    world = World(SimShape(max_num_batched_tokens=8))
    world.open(SequenceSpec("a", tuple(range(20)), sampling, num_choices=num_choices))
    world.run()
    assert world.watch.num_ahead == 2
    world.check(0)


def test_a_fault_before_any_layer_is_done_sends_nobody_elses_kv() -> None:
    """Each slice of a batch that failed runs alone, and reports its own layers alone."""
    world = World(SimShape(poison_token_id=POISON))
    bad = world.open(SequenceSpec("bad", (1, POISON, 3), Sampling(max_tokens=9)))
    others = [world.open(prompt_of(5)), world.open(prompt_of(6, first=20))]
    world.run()
    assert world.ends.pop(bad) == "ENGINE_FAULT"
    assert set(world.ends.values()) == {"handed off"}
    for handle in others:
        world.check(handle)


@pytest.mark.parametrize("number", [*range(1, 5), *range(1001, 1005)])
def test_kv_computed_behind_a_launch_that_fails_is_never_sent(number: int) -> None:
    world = World(SimShape(max_num_batched_tokens=8), fails=frozenset({number}))
    handles = [world.open(prompt_of(20)), world.open(prompt_of(9, first=500))]
    world.run()
    for handle in handles:
        world.check(handle)


def test_kv_goes_to_the_sender_when_the_launch_before_has_succeeded() -> None:
    """A device's launch reports layers before they are computed: what is sent has their mark."""
    world = World(SimShape(max_num_batched_tokens=8))
    log: list[str] = []
    compute, send = world.watch.launch, world.worker.eager.submit

    @dataclass
    class Logged:
        inner: Launched
        number: int

        def samples(self) -> tuple[tuple[Sample, ...], ...]:
            log.append(f"collect {self.number}")
            return self.inner.samples()

    def launch(batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        launched = Logged(compute(batch), len(world.watch.launches))
        log.append(f"launch {launched.number}")
        assert layers_done
        for first_layer in (0, 2):
            place = (launched.number, first_layer)
            world.worker.engine.kv.mark = lambda place=place: place  # type: ignore[method-assign]
            layers_done(first_layer, 2)
        return launched

    def submit(task: LaterTask) -> None:
        if isinstance(task, Send):
            piece = task.piece
            log.append(
                f"send {piece.first_token} of {piece.first_layer}+{piece.num_layers} {task.mark}"
            )
        send(task)

    world.worker.engine.launch = launch  # type: ignore[method-assign]
    world.worker.eager.submit = submit  # type: ignore[method-assign]
    world.open(prompt_of(20))
    world.run()
    assert log == [
        "launch 1",
        "send 0 of 0+4 (1, 2)",
        "launch 2",
        "collect 1",
        "send 8 of 0+4 (2, 2)",
        "launch 3",
        "collect 2",
        "send 16 of 0+2 (3, 0)",
        "send 16 of 2+2 (3, 2)",
        "collect 3",
    ]


#: What happens before a step: a prompt comes, or one that came is given up.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(1, 30)),
        st.tuples(st.just("abort"), st.integers(0, 8)),
        st.tuples(st.just("step"), st.just(0)),
    ),
    max_size=50,
)
FAILS = st.one_of(st.integers(1, 30), st.integers(1001, 1030))


@settings(max_examples=60, deadline=None)
@given(
    events=EVENTS,
    fails=st.frozensets(FAILS, max_size=3),
    num_blocks=st.sampled_from([12, 60]),
    budget=st.sampled_from([5, 8, 32]),
    num_stages=st.sampled_from([1, 2, 4]),
)
def test_each_prompt_leaves_as_it_would_alone(
    events: list[tuple[str, int]],
    fails: frozenset[int],
    num_blocks: int,
    budget: int,
    num_stages: int,
) -> None:
    shape = SimShape(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        poison_token_id=POISON,
        num_stages=num_stages,
    )
    world = World(shape, fails=fails)
    given_up: set[int] = set()
    firsts = itertools.cycle([0, 760, 300])
    for kind, number in events:
        match kind:
            case "open":
                world.open(prompt_of(number, first=next(firsts)))
            case "abort" if 10 * number in world.specs:
                world.worker.submit(StreamCommand(0, 10 * number, Abort()))
                given_up.add(10 * number)
            case "step":
                world.step()
    world.run()
    for handle, spec in world.specs.items():
        end = world.ends.get(handle)
        if end == "handed off":
            assert POISON not in spec.prompt_token_ids
            world.check(handle)
        elif end == "ENGINE_FAULT":
            # A launch of one slice that fails is charged to it.
            assert POISON in spec.prompt_token_ids or fails
        else:
            assert handle in given_up or end == "preempted"
