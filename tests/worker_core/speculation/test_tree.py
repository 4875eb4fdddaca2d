"""A tree of drafts: where the likeliest draft is wrong and an alternative right, the output goes on
from the alternative, with its KV; and blocks and rows are those that were to spare."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.config import DecodeOptions
from baton.config.load import build_options
from baton.errors import ConfigError
from baton.events import Failed, Tokens
from baton.types import KvSource, Sampling, SequenceSpec
from engine.grammar import Grammar
from engine.interface import Batch, Launched, LayersDone
from engine.oracle import OracleEngine
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.grammar_walks import allowed_after, ids_of
from tests.support.random_speculation import RandomSpeculation
from tests.support.sim_tiers import SimDecode, SimShape
from worker_core.commands import Open
from worker_core.speculation.draft_lengths import (
    LATER,
    Acceptance,
    Candidate,
    Rates,
    StepPrices,
    choose_lengths,
)
from worker_core.speculation.interface import NO_PROPOSAL, DraftRequest, Proposal, rows_of_places

WRONG = 998


class OnlyAlternatives(RandomSpeculation):
    """Right up to one place, where an alternative alone is right."""

    def __init__(self, place: int) -> None:
        super().__init__(1)
        self._place = place

    def is_due(self, key: object) -> bool:  # noqa: ARG002
        return True

    def plan(
        self,
        requests: Sequence[DraftRequest],
        num_rows: int,  # noqa: ARG002
        max_num_drafts: int,
    ) -> list[Proposal]:
        planned = []
        for request in requests:
            start = len(request.token_ids) - request.num_prompt_tokens
            most = min(request.max_num_drafts, max_num_drafts // len(requests))
            right = self._output(request)[start : start + most]
            if not right:
                planned.append(NO_PROPOSAL)
                continue
            place = min(self._place, len(right) - 1)
            wrong, other = self._wrong(request, start + place)
            others = ((),) * place + ((other, right[place]),)
            planned.append(Proposal((*right[:place], wrong, *right[place + 1 :]), others))
        return planned

    def _wrong(self, request: DraftRequest, place: int) -> tuple[int, int]:
        """Two for a place of the output, which the grammar allows."""
        output, allowed = self._output(request), allowed_after(request.sampling)
        able = ids_of(allowed(output[:place])) if allowed else (WRONG, WRONG - 1)
        first, second = [token for token in able if token != output[place]][:2]
        return first, second


def run(worker: SimDecode, specs: Sequence[SequenceSpec]) -> dict[int, list[Tokens]]:
    """What each sequence gets, with the pool's books in order after each step."""
    for handle, spec in enumerate(specs):
        worker.submit(Open(0, handle, spec, KvSource.LOCAL))
    came: dict[int, list[Tokens]] = {handle: [] for handle in range(len(specs))}
    while not all(own and own[-1].finish for own in came.values()):
        for event in worker.step().events:
            assert not isinstance(event.event, Failed), event.event
            if isinstance(event.event, Tokens):
                came[event.handle].append(event.event)
        worker.pool.check_integrity()
        assert worker.pool.num_leases <= len(specs), "branches live for one step"
    assert worker.pool.counts().leased == 0
    return came


def ids(events: Sequence[Tokens]) -> list[int]:
    return [sample.token_id for event in events for sample in event.samples]


def expected(spec: SequenceSpec) -> list[int]:
    return ids(run(SimDecode(LoopbackHub(), lambda: 0.0, SimShape()), [spec])[0])


@pytest.mark.parametrize("place", [0, 1, 3, 5])
def test_the_output_goes_on_from_an_alternative(place: int) -> None:
    """Whatever block its KV begins in: prompts of each length up to two blocks."""
    for num_tokens in range(1, 10):
        sampling = Sampling(temperature=0.7, seed=num_tokens, max_tokens=40)
        spec = SequenceSpec("a", tuple(range(1, num_tokens + 1)), sampling)
        worker = SimDecode(
            LoopbackHub(), lambda: 0.0, SimShape(), speculation=OnlyAlternatives(place)
        )
        events = run(worker, [spec])[0]
        assert ids(events) == expected(spec)
        # The right drafts before it, the alternative and the token after it.
        assert {len(event.samples) for event in events[1:-1]} == {place + 2}
        assert all(event.num_accepted_tokens == place + 1 for event in events[1:-1])


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_behind_an_alternative_comes_what_the_grammar_allows_there(place: int) -> None:
    """Which is another set of tokens after each one."""
    grammar = Grammar.regex("([A-F][G-K][L-P][Q-U][V-Z]){8}").to_bytes()
    spec = SequenceSpec("a", (5, 6, 7), Sampling(max_tokens=30, grammar=grammar))
    worker = SimDecode(LoopbackHub(), lambda: 0.0, SimShape(), speculation=OnlyAlternatives(place))
    events = run(worker, [spec])[0]
    assert ids(events) == expected(spec)
    assert {len(event.samples) for event in events[1:-1]} == {place + 2}


def test_kv_of_an_alternative_is_a_prefix_for_others() -> None:
    worker = SimDecode(LoopbackHub(), lambda: 0.0, SimShape(), speculation=OnlyAlternatives(1))
    first = SequenceSpec("a", (5, 6, 7), Sampling(max_tokens=30))
    output = ids(run(worker, [first])[0])
    again = SequenceSpec("b", (5, 6, 7, *output), Sampling(max_tokens=8))
    assert ids(run(worker, [again])[0]) == expected(again)


def test_alternatives_take_what_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither more rows than a step may have, nor blocks that another sequence needs."""
    sizes: list[int] = []
    launch = OracleEngine.launch

    def counting(
        engine: OracleEngine, batch: Batch, layers_done: LayersDone | None = None
    ) -> Launched:
        sizes.append(batch.num_tokens)
        return launch(engine, batch, layers_done)

    monkeypatch.setattr(OracleEngine, "launch", counting)
    for place in range(3):
        shape = SimShape(num_blocks=16, max_num_batched_tokens=12)
        worker = SimDecode(LoopbackHub(), lambda: 0.0, shape, speculation=OnlyAlternatives(place))
        specs = [
            SequenceSpec(f"r{i}", (i, 1, 2), Sampling(max_tokens=28), arrival_ns=i)
            for i in range(2)
        ]
        came = run(worker, specs)
        assert max(sizes) <= 12
        # Nobody is preempted: the two just fit.
        assert [ids(came[i]) for i in range(2)] == [expected(spec) for spec in specs]


def test_rows_of_alternatives_have_their_price() -> None:
    assert rows_of_places((3, 2)) == (1 + 2 * 2, 1 + 3)
    assert rows_of_places((1, 1)) == (1, 1)

    def lengths(rows: tuple[int, ...], max_rows: int, step_s: float) -> list[int]:
        candidates = [Candidate(0.9, 0.9, 4, rows)] * 2
        prices = StepPrices(2, max_rows, lambda more: 1.0 + step_s * more, lambda _n, _m: 0.0)
        return choose_lengths(candidates, prices)

    assert lengths((), 100, 0.0) == [4, 4]
    assert lengths((5, 4), 100, 0.0) == [4, 4]
    assert lengths((5, 4), 9, 0.0) == [1, 0]
    assert sum(lengths((5, 4), 100, 0.2)) < sum(lengths((), 100, 0.2))


def test_a_right_alternative_counts_and_what_is_behind_it_does_not() -> None:
    proposal = Proposal((1, 2, 3), ((7,), (8,)))

    def trials(tokens: Sequence[int]) -> dict[int, tuple[float, float]]:
        own: Rates = {}
        Acceptance().record(own, 0, proposal, tokens)
        return {category: (rate.num_right, rate.num_trials) for category, rate in own.items()}

    assert trials((1, 2, 3))[0] == (1.0, 1.0)
    assert trials((9,)) == {0: (0.0, 1.0)}
    assert trials((7,)) == {0: (1.0, 1.0)}
    assert trials((7, 2)) == {0: (1.0, 1.0), LATER: (0.0, 1.0)}
    assert trials((1, 8)) == {0: (1.0, 1.0), LATER: (1.0, 1.0)}


@pytest.mark.parametrize(
    "values",
    [
        {"speculative_method": "medusa", "speculative_model": "h", "speculative_tree": "3,x"},
        {"speculative_method": "medusa", "speculative_model": "h", "speculative_tree": "0"},
        {"speculative_method": "ngram", "speculative_tree": "3,2"},
        {"speculative_tree": "2"},
    ],
)
def test_trees_that_cannot_be_are_refused(values: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--speculative-tree"):
        build_options(DecodeOptions, {"model": "m", **values})


def test_a_tree_is_read() -> None:
    values = {"speculative_method": "medusa", "speculative_model": "h", "speculative_tree": "3,2,1"}
    assert build_options(DecodeOptions, {"model": "m", **values}).tree_widths == (3, 2, 1)
