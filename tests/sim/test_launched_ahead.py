"""Steps that are launched before the tokens of the one before are known: nobody's output, and no
block, shows it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.commands import Abort, Pause, Resume
from baton.events import Failed, Paused, Tokens
from baton.types import FinishReason, KvSource, Sampling, SequenceSpec
from engine.oracle import oracle_tokens
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.sim_tiers import SimDecode, SimShape
from tests.support.watched_launches import Watch, check_blocks_in_flight
from worker_core.commands import Command, Open, StreamClosed, StreamCommand

VOCAB = 1000


@dataclass
class World:
    """A decode worker that computes all by itself, and what it told."""

    shape: SimShape = SimShape(num_blocks=200)
    fails: frozenset[int] = frozenset()
    specs: dict[int, SequenceSpec] = field(default_factory=dict)
    told: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason | str] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.decoder = SimDecode(LoopbackHub(), lambda: 0.0, self.shape)
        self.watch = Watch(self.decoder.engine, fails=self.fails)
        self.decoder.engine.launch = self.watch.launch  # type: ignore[method-assign]

    def open(self, spec: SequenceSpec) -> int:
        handle = len(self.specs) + 1
        self.specs[handle], self.told[handle] = spec, []
        self.submit(Open(0, handle, spec, KvSource.LOCAL))
        return handle

    def submit(self, command: Command) -> None:
        self.decoder.submit(command)

    def step(self) -> bool:
        """Whether it was idle."""
        step = self.decoder.step()
        for addressed in step.events:
            self._hear(addressed.handle, addressed.event)
        while self.paused:
            self.submit(StreamCommand(0, self.paused.pop(), Resume()))
        self.check()
        return step.is_idle

    def _hear(self, handle: int, event: object) -> None:
        assert handle not in self.ends, f"{event} after the end"
        match event:
            case Tokens(token_index, samples, finish):
                assert handle not in self.paused, "a token after the pause"
                assert token_index == len(self.told[handle])
                self.told[handle] += [sample.token_id for sample in samples]
                if finish is not FinishReason.NONE:
                    self.ends[handle] = finish
            case Failed(reason):
                self.ends[handle] = reason
            case Paused():
                self.paused.add(handle)

    def check(self) -> None:
        check_blocks_in_flight(
            self.decoder.pool, self.watch.in_flight, self.decoder.shape.num_stages
        )

    def run(self) -> None:
        """To the end of all, after which nothing is held."""
        for _ in range(10_000):
            if self.step() and not self.decoder.inbox:
                break
        assert self.decoder.pool.counts().leased == 0
        assert not self.watch.in_flight

    def expected(self, handle: int) -> list[int]:
        spec = self.specs[handle]
        return oracle_tokens(spec.prompt_token_ids, spec.sampling, VOCAB)


def plain(
    name: str, *prompt: int, max_tokens: int = 12, stops: frozenset[int] = frozenset()
) -> SequenceSpec:
    return SequenceSpec(name, prompt, Sampling(max_tokens=max_tokens, stop_token_ids=stops))


def test_a_step_is_launched_before_the_one_before_is_collected() -> None:
    world = World()
    first, second = world.open(plain("a", 1, 2, 3)), world.open(plain("b", 4, 5))
    world.run()
    assert world.watch.num_ahead == 11
    assert [s.follows for s in world.watch.launches[3].slices] == [0, 1]
    assert [world.told[handle] for handle in (first, second)] == [
        world.expected(handle) for handle in (first, second)
    ]


def test_a_wait_for_a_launch_is_told_with_its_own_tokens() -> None:
    beats: list[int] = []
    decoder = SimDecode(LoopbackHub(), lambda: 0.0, SimShape(), beat=beats.append)
    decoder.submit(Open(0, 1, plain("a", *range(9)), KvSource.LOCAL))
    decoder.step()
    assert beats == [9]
    beats.clear()
    decoder.step()
    assert beats[:2] == [1, 9]
    assert set(beats[1:]) == {9}


@pytest.mark.slow
def test_the_last_token_that_a_request_may_have_is_not_gone_beyond() -> None:
    world = World()
    world.open(plain("a", 1, 2, 3, max_tokens=5))
    world.open(plain("long", *range(193), max_tokens=500))
    world.run()
    slices = [part for batch in world.watch.launches for part in batch.slices]
    # A prompt's last token, and each token but the last, are computed once; prompts go in by chunks
    # of 32 tokens.
    assert sum(part.start < 10 and len(part.token_ids) < 4 for part in slices) == 5
    num_tokens = sum(len(part.token_ids) for part in slices)
    assert num_tokens == 3 + 4 + 193 + len(world.told[2]) - 1
    assert all(world.told[handle] == world.expected(handle) for handle in (1,))


def test_what_was_computed_after_a_stop_token_is_thrown_away() -> None:
    tokens = oracle_tokens((1, 2, 3), Sampling(max_tokens=12), VOCAB)
    world = World()
    handle = world.open(plain("a", 1, 2, 3, stops=frozenset({tokens[4]})))
    other = world.open(plain("b", 7, 8))
    while handle not in world.ends:
        world.step()
    assert world.told[handle] == tokens[:5]
    (in_flight,) = world.watch.in_flight
    assert len(in_flight.slices) == 2, "its next token is being computed"
    # Nobody gets its blocks before that is over.
    world.run()
    assert world.told[handle] == tokens[:5]
    assert world.told[other] == world.expected(other)


@pytest.mark.parametrize("end", [StreamCommand(0, 1, Abort()), StreamClosed(0)])
def test_blocks_of_what_is_given_up_are_kept_until_the_launch_that_writes_them_is_collected(
    end: Command,
) -> None:
    world = World()
    world.open(plain("a", 1, 2, 3))
    for _ in range(3):
        world.step()
    world.submit(end)
    world.open(plain("b", 5, 6, 7))
    world.ends[1] = "given up"
    world.run()
    assert world.told[2] == (world.expected(2) if 2 not in world.ends else world.told[2])


def test_a_finished_answer_is_found_as_a_prefix_but_for_what_was_thrown_away() -> None:
    tokens = oracle_tokens((1, 2, 3), Sampling(max_tokens=12), VOCAB)
    world = World()
    world.open(plain("a", 1, 2, 3, stops=frozenset({tokens[8]})))
    world.run()
    said = (1, 2, 3, *tokens[:9])
    # The last token told was computed and thrown away.
    assert world.decoder.pool.num_cached_tokens(b"", (*said, 9, 9, 9, 9)) == 8
    second = world.open(plain("b", *said, 9))
    world.run()
    assert world.told[second] == world.expected(second)


def test_requests_that_must_know_their_tokens_wait_for_them() -> None:
    world = World()
    world.open(plain("a", 1, 2, 3))
    penalised = Sampling(max_tokens=6, presence_penalty=0.5)
    world.open(SequenceSpec("b", (5, 6), penalised))
    world.run()
    assert [world.told[handle] for handle in (1, 2)] == [world.expected(h) for h in (1, 2)]
    # Alone again, the first one runs ahead.
    assert 0 < world.watch.num_ahead < 6


def test_a_drawn_token_that_the_engine_fails_on_fails_its_request_alone() -> None:
    poison = oracle_tokens((1, 2, 3), Sampling(max_tokens=12), VOCAB)[5]
    world = World(SimShape(num_blocks=200, poison_token_id=poison))
    world.open(plain("a", 1, 2, 3))
    world.open(plain("b", 4, 5))
    world.run()
    assert world.ends == {1: "ENGINE_FAULT", 2: FinishReason.LENGTH}
    assert world.told[1] == world.expected(1)[:6]
    assert world.told[2] == world.expected(2)
    assert world.watch.num_ahead > 6, "after the fault, steps are launched ahead again"


@pytest.mark.parametrize("number", [*range(1, 8), *range(1001, 1008)])
def test_a_launch_that_fails_once_costs_nobody_a_token(number: int) -> None:
    world = World(fails=frozenset({number}))
    for handle in (1, 2):
        world.open(plain(f"r{handle}", handle, 5))
    world.run()
    assert [world.told[handle] for handle in (1, 2)] == [world.expected(h) for h in (1, 2)]


#: What happens before a step: a request comes, or one that came is given up or paused.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 30)),
        st.tuples(st.sampled_from(["abort", "pause"]), st.integers(1, 8)),
        st.tuples(st.just("step"), st.just(0)),
    ),
    max_size=60,
)


FAILS = st.one_of(st.integers(1, 40), st.integers(1001, 1040))


@settings(max_examples=60, deadline=None)
@given(
    events=EVENTS,
    fails=st.frozensets(FAILS, max_size=3),
    num_blocks=st.sampled_from([24, 100]),
    num_stages=st.sampled_from([1, 2, 3]),
)
def test_outputs_are_those_of_each_request_alone(
    events: list[tuple[str, int]], fails: frozenset[int], num_blocks: int, num_stages: int
) -> None:
    shape = SimShape(num_blocks=num_blocks, swap_bytes=5_000, num_stages=num_stages)
    world = World(shape, fails=fails)
    given_up: set[int] = set()
    numbers = itertools.count()
    for kind, number in events:
        match kind:
            case "open":
                stops = frozenset(range(number, VOCAB, 9))
                prompt = range(number, 2 * number + 1)
                world.open(plain(f"r{next(numbers)}", *prompt, stops=stops))
            case "abort" if number in world.specs and number not in world.ends:
                world.submit(StreamCommand(0, number, Abort()))
                given_up.add(number)
            case "pause" if number in world.specs and number not in given_up:
                world.submit(StreamCommand(0, number, Pause()))
        if kind == "step":
            world.step()
    world.run()
    for handle, tokens in world.told.items():
        is_whole = isinstance(world.ends.get(handle), FinishReason)
        expected = world.expected(handle)
        assert tokens == (expected if is_whole else expected[: len(tokens)])
