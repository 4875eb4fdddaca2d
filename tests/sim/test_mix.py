"""Everything at once: requests of every kind, on tiers of every shape, moved, swapped, preempted
and given up at random.

    python -m pytest tests/sim/test_mix.py --num-seeds 5000

runs more seeds than the suite does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from baton.types import FinishReason, SequenceSpec
from engine.oracle import FULL_LAYERS, OracleLayers
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.mixed_requests import draw_request, expected_outputs, num_prompt_logprobs
from tests.support.random_speculation import RandomSpeculation
from tests.support.sim_client import SimClient
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape
from worker_core.speculation.interface import Speculation

#: Requests of one seed.
NUM_REQUESTS = 8
#: That the blocks of a small decode worker hold; the longest request takes most of them. A model
#: with states takes one more for each of its beams.
FEW_TOKENS, MAX_NUM_BEAMS = 120, 4


def draw_shape(
    rng: random.Random, layers: OracleLayers, *, has_window_slots: bool = False
) -> SimShape:
    return SimShape(
        layers=layers,
        has_window_slots=has_window_slots,
        num_blocks=rng.choice([48, 80, 200]),
        block_size=rng.choice([3, 4, 8]),
        max_num_seqs=rng.choice([3, 5, 16]),
        max_num_batched_tokens=rng.choice([8, 32]),
        max_local_prefill_tokens=rng.choice([0, 0, 12]),
        enable_prefix_caching=rng.random() < 0.8,
        swap_bytes=rng.choice([0, 5_000, 50_000]),
        min_fetched_tokens=rng.choice([1, 1000]),
        max_num_launches=rng.choice([1, 2]),
        num_stages=1 if layers.has_states else rng.choice([1, 1, 2, 3]),
    )


def draw_decode_shape(rng: random.Random, draw: Callable[[], SimShape]) -> SimShape:
    """The blocks of some workers hold one request, or two: sequences take turns there, and wait
    swapped or are placed anew."""
    shape = draw()
    if rng.random() < 0.6:
        num_states = MAX_NUM_BEAMS if shape.layers.has_states else 0
        return replace(shape, num_blocks=-(-FEW_TOKENS // shape.block_size) + num_states)
    return shape


def draw_speculation(rng: random.Random, layers: OracleLayers) -> Speculation | None:
    if rng.random() >= 0.5:
        return None
    drafts = RandomSpeculation(rng.getrandbits(32), layers=layers)
    return None if layers.has_states else drafts


def make(rng: random.Random, layers: OracleLayers, *, has_window_slots: bool) -> SimClient:
    hub = LoopbackHub()
    client = SimClient(rng, [], [], move_rate=rng.choice([0.0, 0.1]))
    shape = partial(draw_shape, rng, layers, has_window_slots=has_window_slots)
    for index in range(rng.randint(1, 2)):
        client.prefills.append(SimPrefill(hub, lambda: client.now, shape(), f"p{index}"))
    for index in range(rng.randint(1, 3)):
        client.decodes.append(
            SimDecode(
                hub,
                lambda: client.now,
                draw_decode_shape(rng, shape),
                f"d{index}",
                seed=index,
                speculation=draw_speculation(rng, layers),
            )
        )
    return client


def check(client: SimClient, spec: SequenceSpec, layers: OracleLayers) -> None:
    is_whole = True
    for expected in expected_outputs(spec, layers):
        got = client.output_of(expected.choice)
        if client.finished[expected.choice] is FinishReason.NONE:  # given up
            assert got == expected.token_ids[: len(got)]
            is_whole = False
            continue
        assert got == expected.token_ids
        if expected.score is not None:
            assert client.scores[expected.choice] == pytest.approx(expected.score)
    if is_whole:
        assert client.prompt_logprobs.get(spec.request_id, 0) == num_prompt_logprobs(spec)


def begin_alike(rng: random.Random, spec: SequenceSpec) -> SequenceSpec:
    """The request behind the beginning of a prompt that all such requests have in common."""
    common = range(100, 100 + rng.randint(0, 24))
    return replace(spec, prompt_token_ids=(*common, *spec.prompt_token_ids[:4]))


def run_seed(
    seed: int, layers: OracleLayers = FULL_LAYERS, *, has_window_slots: bool = False
) -> SimClient:
    rng = random.Random(seed)
    client = make(rng, layers, has_window_slots=has_window_slots)
    plain_share = rng.choice([0.0, 0.95])
    specs = [draw_request(rng, index, plain_share) for index in range(NUM_REQUESTS)]
    if layers.window:
        specs = [begin_alike(rng, spec) for spec in specs]
    specs = [spec for spec in specs if client.wide_enough(spec)]
    client.waiting += specs
    client.run(num_cancels=rng.choice([0, 0, 4]))
    client.quiet()
    assert not client.failed
    for spec in specs:
        check(client, spec, layers)
    return client


def test_every_stream_equals_its_request_alone(mix_seed: int) -> None:
    run_seed(mix_seed)


def test_so_does_every_stream_of_a_model_with_windowed_layers(mix_seed: int) -> None:
    run_seed(mix_seed, OracleLayers(random.Random(mix_seed).choice([1, 5, 16])))


def test_so_does_every_stream_of_a_model_with_windowed_layers_apart(mix_seed: int) -> None:
    layers = OracleLayers(random.Random(mix_seed).choice([1, 5, 16]))
    run_seed(mix_seed, layers, has_window_slots=True)


def test_so_does_every_stream_of_a_model_that_holds_its_window_alone(mix_seed: int) -> None:
    window = random.Random(mix_seed).choice([2, 5, 16])
    run_seed(mix_seed, OracleLayers(window, has_full_layers=False))


def test_so_does_every_stream_of_a_model_with_states(mix_seed: int) -> None:
    window = random.Random(mix_seed).choice([0, 0, 5])
    run_seed(mix_seed, OracleLayers(window, has_states=True))
