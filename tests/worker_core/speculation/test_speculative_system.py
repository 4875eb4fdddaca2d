"""Streams are the same with speculation as without, whatever is drafted, and whatever happens to
workers and clients."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from baton.commands import Abort
from baton.events import LocalPrefill, Prefilled, Tokens
from baton.types import FinishReason, KvSource, Sampling, SequenceSpec
from engine.oracle import oracle_tokens
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.random_speculation import RandomSpeculation
from tests.support.sim_system import History, System
from tests.support.sim_tiers import SimDecode, SimShape
from tests.support.virtual_loop import run_virtual
from worker_core.commands import Open, StreamCommand
from worker_core.speculation.interface import DraftRequest

VOCAB = 1000
HANDLES = itertools.count()


def draw_spec(rng: random.Random, index: int) -> SequenceSpec:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 30)))
    max_tokens = rng.randint(1, 40)
    sampling = Sampling(
        temperature=rng.choice([0.0, 0.7]),
        seed=rng.getrandbits(64),
        presence_penalty=rng.choice([0.0, 0.5]),
        logprobs=rng.choice([-1, 2]),
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens),
        stop_token_ids=frozenset(rng.sample(range(VOCAB), 40)),
    )
    num_choices = rng.choice([1, 1, 3])
    return SequenceSpec(f"r{index}", prompt, sampling, arrival_ns=index, num_choices=num_choices)


def expected(spec: SequenceSpec) -> list[list[int]]:
    return [
        oracle_tokens(spec.prompt_token_ids, spec.sampling, VOCAB, choice)
        for choice in range(spec.num_choices)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "decode_shape",
    [
        pytest.param(SimShape(), id="roomy"),
        pytest.param(SimShape(num_blocks=22), id="full"),
        pytest.param(SimShape(num_blocks=22, swap_bytes=4096), id="swapping"),
        pytest.param(
            SimShape(max_num_batched_tokens=6, max_num_seqs=6, max_local_prefill_tokens=9),
            id="small-steps",
        ),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_streams_are_those_of_no_speculation(seed: int, decode_shape: SimShape) -> None:
    async def main() -> None:
        system = System(seed, num_decode=2, decode_shape=decode_shape, speculates=True)
        specs = [draw_spec(system.rng, index) for index in range(12)]
        histories = [History() for _ in specs]
        clients = [
            asyncio.create_task(system.request(spec, history))
            for spec, history in zip(specs, histories, strict=True)
        ]
        await asyncio.sleep(0.2)
        for client in system.rng.sample(clients, 3):
            client.cancel()
        if seed % 2:
            await system.decodes[0].kill()
        await asyncio.gather(*clients, return_exceptions=True)
        await system.close()
        for spec, history in zip(specs, histories, strict=True):
            assert history.error is None
            history.check(expected(spec))
        drafted = sum(c.usage.draft_tokens for h in histories for c in h.chunks)
        accepted = sum(c.usage.accepted_tokens for h in histories for c in h.chunks)
        assert 0 < accepted < drafted

    run_virtual(main())


def run_alone(spec: SequenceSpec, shape: SimShape = SimShape()) -> tuple[list[Tokens], SimDecode]:
    """The token events of one sequence on a worker of its own that drafts at random."""
    worker = SimDecode(LoopbackHub(), lambda: 0.0, shape, speculation=RandomSpeculation(7))
    return run_to_end(worker, spec), worker


def run_to_end(worker: SimDecode, spec: SequenceSpec) -> list[Tokens]:
    worker.submit(Open(0, next(HANDLES), spec, KvSource.LOCAL))
    told: list[Tokens] = []
    while not (told and told[-1].finish):
        for event in worker.step().events:
            assert isinstance(event.event, Tokens | LocalPrefill | Prefilled)
            told += [event.event] if isinstance(event.event, Tokens) else []
        worker.pool.check_integrity()
    return told


@pytest.mark.parametrize("max_tokens", range(1, 16, 2))
def test_an_output_ends_in_the_midst_of_accepted_drafts(max_tokens: int) -> None:
    spec = SequenceSpec("a", (1, 2, 3), Sampling(max_tokens=max_tokens, logprobs=1))
    told, worker = run_alone(spec)
    (output,) = expected(spec)
    assert [s.token_id for t in told for s in t.samples] == output
    assert [t.token_index for t in told] == [
        sum(len(t.samples) for t in told[:i]) for i in range(len(told))
    ]
    assert all(s.logprobs for t in told for s in t.samples)
    assert all(t.num_accepted_tokens == len(t.samples) - 1 <= t.num_draft_tokens for t in told)
    assert worker.pool.counts().leased == 0


@pytest.mark.slow
def test_what_is_cached_of_a_sequence_that_ended_within_drafts_is_right() -> None:
    """Blocks that hold rejected drafts, or accepted ones after the end, are no prefix of
    anything."""
    for stop_index in range(1, 25, 3):
        endless = Sampling(max_tokens=40)
        (output,) = expected(SequenceSpec("a", (5, 6, 7), endless))
        stops = frozenset({output[stop_index]})
        first = SequenceSpec("a", (5, 6, 7), Sampling(max_tokens=40, stop_token_ids=stops))
        _, worker = run_alone(first)
        ended = oracle_tokens((5, 6, 7), first.sampling, VOCAB)
        again = SequenceSpec("b", (5, 6, 7, *ended), Sampling(max_tokens=4))
        told = run_to_end(worker, again)
        assert [s.token_id for t in told for s in t.samples] == expected(again)[0]


def test_drafts_stop_at_the_models_length() -> None:
    spec = SequenceSpec("a", tuple(range(10)), Sampling(max_tokens=30))
    told, worker = run_alone(spec, SimShape(num_blocks=10))
    assert worker.engine.spec.max_model_len == 40
    assert sum(len(t.samples) for t in told) == 30
    assert told[-1].finish is FinishReason.LENGTH


def test_a_draft_that_the_engine_cannot_compute_does_not_harm_its_sequence() -> None:
    spec = SequenceSpec("a", (1, 2, 3), Sampling(max_tokens=30))
    (output,) = expected(spec)

    class Poisonous(RandomSpeculation):
        def _any(self, request: DraftRequest, place: int) -> int:  # noqa: ARG002
            return 999

    assert 999 not in output
    worker = SimDecode(
        LoopbackHub(), lambda: 0.0, SimShape(poison_token_id=999), speculation=Poisonous(3)
    )
    told = run_to_end(worker, spec)
    assert [s.token_id for t in told for s in t.samples] == output


def test_drafts_take_no_block_that_another_sequence_needs() -> None:
    """Two sequences that just fit, one of them drafting: nobody is preempted for a draft."""
    worker = SimDecode(
        LoopbackHub(), lambda: 0.0, SimShape(num_blocks=16), speculation=RandomSpeculation(1)
    )
    specs = [SequenceSpec(f"r{i}", (i, 1, 2), Sampling(max_tokens=28)) for i in range(2)]
    for handle, spec in enumerate(specs):
        worker.submit(Open(0, handle, spec, KvSource.LOCAL))
    outputs: dict[int, list[int]] = {0: [], 1: []}
    num_ended = 0
    while num_ended < 2:
        for event in worker.step().events:
            assert type(event.event).__name__ in ("LocalPrefill", "Prefilled", "Tokens")
            if isinstance(event.event, Tokens):
                outputs[event.handle] += [s.token_id for s in event.event.samples]
                num_ended += bool(event.event.finish)
        worker.pool.check_integrity()
    assert [outputs[0], outputs[1]] == [expected(spec)[0] for spec in specs]


def test_an_aborted_sequence_leaves_nothing_behind() -> None:
    worker = SimDecode(LoopbackHub(), lambda: 0.0, SimShape(), speculation=RandomSpeculation(2))
    worker.submit(Open(0, 1, SequenceSpec("a", (1, 2), Sampling(max_tokens=50)), KvSource.LOCAL))
    for _ in range(4):
        worker.step()
    worker.submit(StreamCommand(0, 1, Abort()))
    worker.step()
    assert worker.pool.counts().leased == 0
