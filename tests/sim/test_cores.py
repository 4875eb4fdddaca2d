"""The two tiers' cores and the channel between them, stepped in random order over many seeds,
against the oracle."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest

from baton.types import FinishReason, Sampling, SequenceSpec
from engine.oracle import OracleLayers, oracle_tokens
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.sim_client import Choice, SimClient
from tests.support.sim_tiers import GROUPS, KV, STATES, SimDecode, SimPrefill, SimShape

VOCAB = 1000
of_each_kind = pytest.mark.parametrize("kind", [KV, STATES, GROUPS], ids=["kv", "states", "groups"])


def draw_spec(
    rng: random.Random, index: int, penalties: Sequence[float] = (0.0, 0.5)
) -> SequenceSpec:
    prefix = [[1] * 20, [2] * 9, []][rng.randrange(3)]
    prompt = (*prefix, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))))
    is_greedy = rng.random() < 0.5
    sampling = Sampling(
        temperature=0.0 if is_greedy else 0.7,
        seed=rng.getrandbits(64),
        presence_penalty=rng.choice(penalties),
        max_tokens=rng.randint(1, 30),
        min_tokens=rng.choice([0, 0, 1]),
        stop_token_ids=frozenset(rng.sample(range(VOCAB), 20)),
    )
    return SequenceSpec(
        f"r{index}",
        prompt,
        sampling,
        tenant=rng.choice([b"", b"t" * 16]),
        priority=rng.choice([0, 0, 1]),
        arrival_ns=index,
        num_choices=rng.choice([1, 1, 1, 2, 3]),
    )


def make(seed: int, *, decode_shape: SimShape, prefill_shape: SimShape, num: int) -> SimClient:
    hub = LoopbackHub()
    client = SimClient(random.Random(seed), [], [])
    client.prefills += [
        SimPrefill(hub, lambda: client.now, prefill_shape, f"p{i}") for i in range(num)
    ]
    client.decodes += [
        SimDecode(hub, lambda: client.now, decode_shape, f"d{i}", seed=i) for i in range(num)
    ]
    return client


SHAPES = [
    pytest.param(SimShape(), SimShape(), id="roomy"),
    pytest.param(SimShape(num_blocks=24), SimShape(block_size=7), id="decode-full"),
    pytest.param(SimShape(block_size=3), SimShape(num_blocks=23), id="prefill-full"),
    pytest.param(
        SimShape(num_blocks=30, max_local_prefill_tokens=12, max_num_batched_tokens=8),
        SimShape(max_num_batched_tokens=5),
        id="small-chunks-local-prefill",
    ),
    pytest.param(
        SimShape(enable_prefix_caching=False, max_num_seqs=3),
        SimShape(block_size=16),
        id="no-cache",
    ),
    pytest.param(
        replace(STATES, max_num_seqs=3, max_local_prefill_tokens=12),
        replace(STATES, block_size=7, max_num_seqs=2, max_num_batched_tokens=5),
        id="few-states",
    ),
    pytest.param(
        replace(STATES, num_blocks=24),
        replace(STATES, num_blocks=23),
        id="states-full",
    ),
    pytest.param(
        replace(GROUPS, num_blocks=32, max_local_prefill_tokens=12),
        replace(GROUPS, block_size=7),
        id="groups",
    ),
    pytest.param(
        replace(GROUPS, num_blocks=30), replace(GROUPS, has_window_slots=False), id="groups-to-one"
    ),
]


def expected(specs: list[SequenceSpec], layers: OracleLayers) -> Iterator[tuple[Choice, list[int]]]:
    """What each choice gets when it is the only sequence anywhere."""
    for spec in specs:
        prompt, sampling = spec.prompt_token_ids, spec.sampling
        for choice in range(spec.num_choices):
            tokens = oracle_tokens(prompt, sampling, VOCAB, choice, layers=layers)
            yield Choice(spec.request_id, choice), tokens


def check_outputs(client: SimClient, specs: list[SequenceSpec]) -> None:
    """Every choice got its own tokens, up to where it was given up."""
    for choice, tokens in expected(specs, client.decodes[0].shape.layers):
        got = client.output_of(choice)
        is_cut = client.finished[choice] is FinishReason.NONE
        assert got == (tokens[: len(got)] if is_cut else tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("decode_shape", "prefill_shape"), SHAPES)
@pytest.mark.parametrize(
    "seed", [1, 2, 3, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 4, 5))]
)
def test_two_tiers_give_what_one_request_alone_gives(
    seed: int, decode_shape: SimShape, prefill_shape: SimShape
) -> None:
    """The first three seeds have each number of workers, of launches and each penalty, and several
    workers with one launch and with two."""
    decode_shape = replace(decode_shape, max_num_launches=1 + seed // 2 % 2)
    client = make(seed, decode_shape=decode_shape, prefill_shape=prefill_shape, num=1 + seed % 2)
    specs = [draw_spec(client.rng, index, (0.0, 0.5 * (seed % 3))) for index in range(20)]
    client.waiting += specs
    client.run()
    client.quiet()
    assert not client.failed
    check_outputs(client, specs)


@pytest.mark.slow
@of_each_kind
def test_cancels_at_any_moment_leave_no_block_behind_and_disturb_nobody(
    core_seed: int, kind: SimShape
) -> None:
    seed = core_seed
    client = make(
        seed,
        decode_shape=replace(kind, num_blocks=40),
        prefill_shape=replace(kind, block_size=8),
        num=2,
    )
    specs = [draw_spec(client.rng, index, (0.0, 0.5 * (seed % 3))) for index in range(24)]
    client.waiting += specs
    client.run(num_cancels=10)
    client.quiet()
    assert not client.failed
    check_outputs(client, specs)


@pytest.mark.slow
def test_memory_pressure_preempts() -> None:
    seen: set[str] = set()
    for seed in range(6):
        client = make(seed, decode_shape=SimShape(num_blocks=24), prefill_shape=SimShape(), num=1)
        client.waiting += [draw_spec(client.rng, index) for index in range(20)]
        client.run()
        seen |= client.seen
    assert {"Preempted", "Deferred", "Committed", "Offered", "Tokens", "Prefilled"} <= seen


@pytest.mark.slow
@of_each_kind
def test_sequences_that_move_between_decode_workers_and_are_swapped_lose_nothing(
    core_seed: int, kind: SimShape
) -> None:
    seed = core_seed
    client = make(
        seed,
        decode_shape=replace(kind, num_blocks=30, swap_bytes=4000 if seed % 2 else 0),
        prefill_shape=replace(kind, block_size=8),
        num=2 + seed % 2,
    )
    client.move_rate = 0.1
    specs = [draw_spec(client.rng, index, (0.0, 0.5 * (seed % 3))) for index in range(24)]
    client.waiting += specs
    client.run(num_cancels=seed % 3 * 4)
    client.quiet()
    assert not client.failed
    check_outputs(client, specs)


@pytest.mark.slow
@of_each_kind
def test_moves_and_swaps_do_happen(kind: SimShape) -> None:
    seen: set[str] = set()
    num_swaps = 0
    for seed in range(6):
        shape = replace(kind, num_blocks=24, swap_bytes=20_000)
        client = make(seed, decode_shape=shape, prefill_shape=kind, num=2)
        client.move_rate = 0.1
        client.waiting += [draw_spec(client.rng, index) for index in range(20)]
        client.run()
        num_swaps += sum(worker.swap.num_swaps for worker in client.decodes)
        seen |= client.seen
    assert {"Paused", "HandedOff", "NotHandedOff"} <= seen
    assert num_swaps


def test_all_slots_of_states_are_in_use_at_once() -> None:
    """And nobody lacks one, see EnoughSlots."""
    decode_shape = replace(STATES, max_num_seqs=3)
    prefill_shape = replace(decode_shape, max_num_seqs=1)
    client = make(0, decode_shape=decode_shape, prefill_shape=prefill_shape, num=1)
    client.waiting += [draw_spec(client.rng, index) for index in range(12)]
    client.run()
    client.quiet()
    for worker in (*client.prefills, *client.decodes):
        assert worker.state_slots
        assert worker.state_slots.fewest == 0


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("seed", range(6))
def test_the_next_turn_of_a_conversation_fetches_what_the_decode_worker_kept(seed: int) -> None:
    fetcher = SimShape(block_size=8, min_fetched_tokens=1)
    client = make(seed, decode_shape=SimShape(num_blocks=200), prefill_shape=fetcher, num=1)
    first = draw_spec(client.rng, 0)
    client.waiting.append(replace(first, num_choices=1))
    client.run()
    said = (*first.prompt_token_ids, *client.output_of(Choice("r0", 0)))
    # A prefill worker that was started anew knows nothing of the first turn.
    client.prefills[0] = SimPrefill(client.prefills[0].hub, lambda: client.now, fetcher, "p9")
    turn = replace(first, request_id="r1", prompt_token_ids=(*said, *range(50, 90)), num_choices=2)
    client.waiting.append(turn)
    client.run()
    client.quiet()
    check_outputs(client, [turn])
    num_kept = (
        (len(said) - 1) // 4 * 4
    )  # the last token has no KV, and what is kept are whole blocks
    assert client.num_fetched in (num_kept, num_kept - 4)


@pytest.mark.slow
@of_each_kind
@pytest.mark.parametrize("tier", ["prefill", "decode"])
def test_a_fault_in_a_step_is_charged_to_its_request_alone(tier: str, kind: SimShape) -> None:
    poison = 777
    shape, sound = replace(kind, poison_token_id=poison), kind
    client = make(
        3,
        decode_shape=shape if tier == "decode" else sound,
        prefill_shape=shape if tier == "prefill" else sound,
        num=1,
    )
    specs = [draw_spec(client.rng, index) for index in range(10)]
    specs = [s for s in specs if poison not in s.prompt_token_ids]
    prompt = (
        (5, poison, 6)
        if tier == "prefill"
        else next(
            (m, n)
            for m, n in product((5, 6, 7), range(VOCAB))
            if oracle_tokens((m, n), Sampling(max_tokens=2), VOCAB, layers=kind.layers)[1] == poison
        )
    )
    bad = SequenceSpec("bad", prompt, Sampling(max_tokens=8))
    client.waiting += [*specs[:5], bad, *specs[5:]]
    client.run()
    client.quiet()
    assert client.failed["bad"].reason == "ENGINE_FAULT"
    for choice, tokens in expected(specs, kind.layers):
        if poison not in tokens[:-1]:
            assert client.output_of(choice) == tokens
