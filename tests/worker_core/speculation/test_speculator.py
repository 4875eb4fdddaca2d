"""Speculation under a virtual clock: it gains where there is something to gain, and costs next to
nothing elsewhere."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.config import DecodeOptions
from baton.errors import StartupError
from baton.types import Sampling
from engine.oracle import FULL_LAYERS, undisturbed_oracle
from engine.ranks.mesh import ONE_RANK
from worker_core.drafting import verify
from worker_core.nodes import degrees_of
from worker_core.speculation import speculator
from worker_core.speculation.draft_lengths import DraftCosts
from worker_core.speculation.interface import NO_PROPOSAL, NOTHING, DraftRequest, Estimate, Proposal
from worker_core.speculation.speculator import MAX_PROBE_INTERVAL, PROBE_INTERVAL, Speculator

StepTime = Callable[[int, int], float]


@dataclass
class FakeProposer:
    """Right with probability `chance`, each time it is asked; a free one tells its drafts with the
    estimate."""

    clock: Clock
    chance: Callable[[int], float]
    is_free: bool = True
    draft_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    forgotten: list[Hashable] = field(default_factory=list)

    def estimate(self, requests: Sequence[DraftRequest]) -> list[Estimate]:
        if not self.is_free:
            return [Estimate(request.max_num_drafts) for request in requests]
        found = [self._guess(request) for request in requests]
        return [Estimate(len(drafts), 0, drafts) if drafts else NOTHING for drafts in found]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        most = max(request.max_num_drafts for request in requests)
        self.clock.now_s += self.cost_s(len(requests), most)
        return [Proposal(self._guess(request)) for request in requests]

    def cost_s(self, num_sequences: int, num_drafts: int) -> float:
        return self.draft_s * num_drafts if num_sequences else 0.0

    def forget(self, key: Hashable) -> None:
        self.forgotten.append(key)

    def _guess(self, request: DraftRequest) -> tuple[int, ...]:
        start = len(request.token_ids)
        right = range(start, start + request.max_num_drafts)
        return tuple(t if self.rng.random() < self.chance(t) else -1 for t in right)


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class World:
    """A batch of sequences that count upwards: the token at place t is t. A step of r rows takes
    step_s(num_sequences, r)."""

    proposer: FakeProposer
    num_sequences: int
    step_s: StepTime
    max_num_drafts: int = 5

    def __post_init__(self) -> None:
        self.speculator = Speculator(self.proposer, self.max_num_drafts, self.proposer.clock)
        self.texts = [[0] for _ in range(self.num_sequences)]
        self.num_drafted = 0

    def step(self) -> None:
        asked = [key for key in range(self.num_sequences) if self.speculator.is_due(key)]
        requests = [
            DraftRequest(key, self.texts[key], 1, self.max_num_drafts, Sampling()) for key in asked
        ]
        planned = self.speculator.plan(requests, self.num_sequences, 1000)
        drafts = {key: proposal.token_ids for key, proposal in zip(asked, planned, strict=True)}
        num_drafts = sum(map(len, drafts.values()))
        self.num_drafted += num_drafts
        self.proposer.clock.now_s += self.step_s(
            self.num_sequences, self.num_sequences + num_drafts
        )
        for key, text in enumerate(self.texts):
            own = drafts.get(key, ())
            draws = list(range(len(text), len(text) + len(own) + 1))
            got = draws[: verify(own, draws) + 1]
            text.extend(got)
            if key in drafts:
                self.speculator.record(key, got)
        self.speculator.on_step_end(self.num_sequences, num_drafts)

    def gain(self, num_steps: int = 600) -> float:
        """Tokens per second over those of no speculation."""
        for _ in range(num_steps):
            self.step()
        num_tokens = sum(len(text) - 1 for text in self.texts)
        plain_s = self.step_s(self.num_sequences, self.num_sequences) / self.num_sequences
        return num_tokens * plain_s / self.proposer.clock.now_s


def flat(num_sequences: int, num_rows: int) -> float:  # noqa: ARG001
    """Far below the ridge: rows are nearly free."""
    return 0.004 + 0.00005 * num_rows


def steep(num_sequences: int, num_rows: int) -> float:  # noqa: ARG001
    """Saturated: time goes with rows."""
    return 0.0002 * num_rows


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("chance", "at_least"), [(0.95, 3.5), (0.8, 2.2), (0.5, 1.2)])
@pytest.mark.parametrize("num_sequences", [1, 8])
def test_good_drafts_gain_where_rows_are_nearly_free(
    num_sequences: int, chance: float, at_least: float
) -> None:
    proposer = FakeProposer(Clock(), lambda _: chance)
    assert World(proposer, num_sequences, flat).gain() > at_least


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.99])
@pytest.mark.parametrize("is_free", [True, False])
@pytest.mark.parametrize("num_sequences", [1, 5, 64])
def test_a_saturated_machine_loses_next_to_nothing(
    num_sequences: int, is_free: bool, chance: float
) -> None:
    proposer = FakeProposer(Clock(), lambda _: chance, is_free, 0.0 if is_free else 0.0005)
    assert World(proposer, num_sequences, steep).gain() > 0.98


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("is_free", [True, False])
@pytest.mark.parametrize("num_sequences", [1, 16])
def test_bad_drafts_lose_next_to_nothing(num_sequences: int, is_free: bool) -> None:
    proposer = FakeProposer(Clock(), lambda _: 0.02, is_free, 0.0 if is_free else 0.001)
    assert World(proposer, num_sequences, flat).gain(2000) > 0.98


def test_a_draft_model_as_slow_as_the_target_is_hardly_used() -> None:
    proposer = FakeProposer(Clock(), lambda _: 0.7, is_free=False, draft_s=0.004)
    world = World(proposer, 1, flat)
    assert world.gain(2000) > 0.98
    assert world.num_drafted <= 2000 / PROBE_INTERVAL + 5


def test_free_drafts_are_taken_up_when_they_begin_to_be_right() -> None:
    """A sequence that begins to copy: noticed without a single draft verified before."""
    proposer = FakeProposer(Clock(), lambda token: 0.95 if token > 500 else 0.0)
    world = World(proposer, 1, flat)
    for _ in range(480):
        world.step()
    wasted = world.num_drafted
    for _ in range(100):
        world.step()
    assert wasted <= 480 / PROBE_INTERVAL + 5
    assert len(world.texts[0]) > 480 + 100 * 2.5


@pytest.mark.slow
def test_a_draft_model_that_begins_to_be_right_is_noticed_by_probes() -> None:
    proposer = FakeProposer(
        Clock(), lambda token: 0.95 if token > 500 else 0.0, is_free=False, draft_s=0.0002
    )
    world = World(proposer, 1, flat)
    for _ in range(500 + 8 * MAX_PROBE_INTERVAL):
        world.step()
    num_tokens = len(world.texts[0])
    for _ in range(100):
        world.step()
    assert len(world.texts[0]) - num_tokens > 250


def test_one_sequence_that_copies_is_drafted_for_in_a_batch_that_does_not() -> None:
    class Mixed(FakeProposer):
        def _guess(self, request: DraftRequest) -> tuple[int, ...]:
            self.chance = lambda _: 0.98 if request.key == 0 else 0.0
            return super()._guess(request)

    world = World(Mixed(Clock(), lambda _: 0.0), 16, lambda b, r: 0.004 + 0.0002 * r + 0 * b)
    world.gain(300)
    lengths = [len(text) for text in world.texts]
    assert lengths[0] > 3 * max(lengths[1:])
    assert max(lengths[1:]) < 330


def test_a_forgotten_sequence_is_forgotten_everywhere() -> None:
    proposer = FakeProposer(Clock(), lambda _: 0.5)
    world = World(proposer, 1, flat)
    world.gain(10)
    world.speculator.forget(0)
    world.speculator.forget(0)
    assert proposer.forgotten == [0, 0]
    assert not world.speculator._tracks


def test_nothing_is_drafted_before_a_step_of_about_that_size_was_timed() -> None:
    clock = Clock()
    speculator = Speculator(FakeProposer(clock, lambda _: 1.0), 4, clock)
    request = DraftRequest("a", (1, 2, 3), 3, 4, Sampling(), 0)

    def step(num_rows: int) -> int:
        ((drafts, _),) = speculator.plan([request], num_rows, 4)
        clock.now_s += 1.0
        speculator.record("a", range(3, 7))
        speculator.on_step_end(num_rows, len(drafts))
        return len(drafts)

    assert step(1) == 0
    assert any(step(1) for _ in range(2 * PROBE_INTERVAL))
    assert step(64) == 0
    assert step(66) > 0


class LateProposer(FakeProposer):
    """Needs some steps before it has drafts, as a head without kept states does."""

    num_late = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if self.num_late:
            self.num_late -= 1
            return [NO_PROPOSAL] * len(requests)
        return super().propose(requests)


def test_a_proposer_that_makes_ready_first_is_asked_again() -> None:
    clock = Clock()
    proposer = LateProposer(clock, lambda _: 0.0, is_free=False, draft_s=0.004)
    world = World(proposer, 1, flat)
    for _ in range(200):
        world.step()
    before = world.num_drafted
    proposer.num_late = 3
    while proposer.num_late == 3:
        world.step()
    for _ in range(3):
        world.step()
    assert world.num_drafted == before + 1


@dataclass
class ColdProposer(FakeProposer):
    """One draft of a few takes draft_s, and each further one a third of that; but if none was asked
    for in the last ten steps of 4 ms, the first takes as long as a step: memory is cold, or a
    context has to be computed. Like real ones, it knows what it has observed."""

    costs: DraftCosts = field(default_factory=DraftCosts)
    last_s: float = -1.0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        most = max(request.max_num_drafts for request in requests)
        start_s = self.clock.now_s
        first_s = self.draft_s if start_s - self.last_s < 0.04 else 0.004
        self.clock.now_s += first_s + (most - 1) * self.draft_s / 3
        self.last_s = self.clock.now_s
        self.costs.observe(len(requests), most, self.last_s - start_s)
        return [Proposal(self._guess(request)) for request in requests]

    def cost_s(self, num_sequences: int, num_drafts: int) -> float:
        return self.costs.seconds(num_sequences, num_drafts)


@pytest.mark.parametrize(("chance", "at_least"), [(0.7, 1.6), (0.55, 1.25)])
def test_drafts_that_are_cheap_once_they_are_made_all_the_time_are_made(
    chance: float, at_least: float
) -> None:
    """What a first draft takes after a pause is not what drafts cost."""
    proposer = ColdProposer(Clock(), lambda _: chance, is_free=False, draft_s=0.0006)
    assert World(proposer, 1, flat).gain(2000) > at_least


def test_trials_of_drafts_that_are_never_worth_it_cost_next_to_nothing() -> None:
    proposer = ColdProposer(Clock(), lambda _: 0.3, is_free=False, draft_s=0.002)
    assert World(proposer, 1, flat).gain(2000) > 0.97


def test_costs_are_the_middle_of_what_was_seen_and_further_drafts_a_share_of_the_first() -> None:
    costs = DraftCosts()
    for seconds in (9.0, 1.0):
        costs.observe(1, 1, seconds)
        assert costs.seconds(1, 3) == 0
    costs.observe(1, 1, 1.0)
    assert costs.seconds(1, 1) == 1
    assert costs.seconds(1, 0) == costs.seconds(0, 1) == 0
    assert 1 < costs.seconds(1, 3) < 3
    # The estimate for more sequences than ever had drafts, until they have.
    assert 1 < costs.seconds(8, 1) < 8
    for seconds in (900.0, 1.5, 1.5):
        assert costs.seconds(1, 3) == pytest.approx(2.0)
        costs.observe(1, 3, seconds)
    assert costs.seconds(1, 3) == pytest.approx(1.5)
    assert costs.seconds(1, 5) == pytest.approx(2.0)


def test_drafts_that_begin_to_be_right_are_seen_through_the_price_of_the_first() -> None:
    """Before, each trial finds all cold; several in a row show what drafts cost."""
    chance = 0.0
    proposer = ColdProposer(Clock(), lambda _: chance, is_free=False, draft_s=0.0006)
    world = World(proposer, 1, flat)
    world.gain(400)
    chance = 0.9
    world.gain(8000)
    before = len(world.texts[0])
    world.gain(100)
    assert len(world.texts[0]) - before > 250


def test_a_draft_that_took_long_when_it_was_tried_is_tried_again() -> None:
    """Steps with two drafts, which are the most, take forty times as long at first."""
    late = iter([0.16] * 12)

    def step_s(num_sequences: int, num_rows: int) -> float:
        return flat(num_sequences, num_rows) + (next(late, 0.0) if num_rows == 3 else 0.0)

    proposer = ColdProposer(Clock(), lambda _: 0.9, is_free=False, draft_s=0.0004)
    world = World(proposer, 1, step_s, max_num_drafts=2)
    world.gain(1500)
    before = len(world.texts[0])
    world.gain(500)
    assert len(world.texts[0]) - before > 500 * 2.3


@pytest.mark.parametrize(
    "degrees",
    [
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "kv_per_rank": True},
        {"data_parallel_size": 2},
    ],
)
def test_a_draft_model_runs_in_rank_0_alone(
    degrees: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[DecodeOptions] = []

    def build(options: DecodeOptions, **_: Any) -> Any:
        asked.append(options)
        raise StartupError("asked for")

    monkeypatch.setattr(speculator, "build_decode_engine", build)
    options = DecodeOptions(model="m", speculative_method="draft", speculative_model="d", **degrees)
    with pytest.raises(StartupError, match="asked for"):
        speculator.build_speculation(options, undisturbed_oracle(97, FULL_LAYERS), time.monotonic)
    (of_draft,) = asked
    assert of_draft.model == "d"
    assert degrees_of(of_draft) == ONE_RANK
    assert not of_draft.kv_per_rank
