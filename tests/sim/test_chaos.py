"""Streams through faults of every kind: workers die and come back, drain, and the KV channel
damages what it carries.

    python -m pytest tests/sim/test_chaos.py --num-seeds 500

drives 10,000 streams. A failure names its seed, which `--first-seed SEED --num-seeds 1` replays.
"""

from __future__ import annotations

import asyncio
import random

from baton.errors import HandoffFailed, NoWorkers, WorkerLost
from baton.types import Tier
from engine.oracle import FULL_LAYERS, OracleLayers
from tests.support.faulty_hub import FaultyHub
from tests.support.mixed_requests import draw_request, expected_outputs
from tests.support.sim_system import DecodeNode, History, PrefillNode, System
from tests.support.sim_tiers import SimShape
from tests.support.virtual_loop import run_virtual

NUM_STREAMS = 20


async def disturb(system: System, rng: random.Random) -> None:
    """Faults of workers at random moments; another one takes the place of each that dies."""
    for number in range(rng.randint(1, 4)):
        await asyncio.sleep(rng.uniform(0.05, 0.8))
        if rng.random() < 0.5:
            await _lose_prefill(system, rng, f"p1{number}")
        else:
            await _lose_decode(system, rng, f"d1{number}")


async def _lose_prefill(system: System, rng: random.Random, successor: str) -> None:
    living = [node for node in system.prefills if not node.is_dead]
    if living:
        await rng.choice(living).kill()
    await asyncio.sleep(rng.uniform(0.0, 1.0))
    system.fleet.add(successor, Tier.PREFILL)
    system.prefills.append(PrefillNode(system, successor))


async def _lose_decode(system: System, rng: random.Random, successor: str) -> None:
    living = [node for node in system.decodes if not node.is_dead]
    if living:
        node = rng.choice(living)
        if rng.random() < 0.5:
            node.drain()
            await asyncio.sleep(rng.uniform(0.0, 0.5))
        await node.kill()
    await asyncio.sleep(rng.uniform(0.0, 1.0))
    system.fleet.add(successor, Tier.DECODE)
    system.decodes.append(DecodeNode(system, successor))


def check(history: History, outputs: list[list[int]]) -> None:
    """Right as far as it goes; an error is one that a client may meet when too much breaks, and
    tells so."""
    history.check(outputs)
    if history.error is not None:
        assert isinstance(history.error, WorkerLost | NoWorkers | HandoffFailed), history.error


def run_seed(seed: int, *, has_states: bool = False, has_groups: bool = False) -> None:
    """has_groups: windowed layers' KV lies apart on both tiers, in few slots."""

    async def main() -> None:
        rng = random.Random(seed)
        layers = rng.choice([FULL_LAYERS, OracleLayers(7), OracleLayers(7, has_full_layers=False)])
        max_num_seqs, max_num_batched_tokens = 16, 32
        if has_groups:
            layers = OracleLayers(rng.choice([3, 7]))
            max_num_seqs, max_num_batched_tokens = rng.choice([4, 6]), 8
        if has_states:
            layers = OracleLayers(layers.window, has_states=True)
            max_num_seqs = rng.choice([5, 16])  # as many slots
        # Of some layers, it may lie apart, whatever the other tier does.
        has_slots = (
            [rng.random() < 0.5 for _ in range(2)] if layers == OracleLayers(7) else [False] * 2
        )
        if has_groups:
            has_slots = [True] * 2
        system = System(
            seed,
            num_prefill=rng.randint(1, 3),
            num_decode=rng.randint(2, 3),
            decode_shape=SimShape(
                num_blocks=rng.choice([60, 300]),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                swap_bytes=20_000,
                max_num_launches=rng.choice([1, 2, 2]),
                layers=layers,
                has_window_slots=has_slots[0],
            ),
            prefill_shape=SimShape(
                block_size=8,
                num_blocks=200,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                min_fetched_tokens=1,
                layers=layers,
                has_window_slots=has_slots[1],
            ),
            hub=FaultyHub(rng, rate=rng.choice([0.0, 0.01, 0.05])),
        )
        plain_share = rng.choice([0.0, 0.95])
        specs = [draw_request(rng, index, plain_share) for index in range(NUM_STREAMS)]
        histories = [History() for _ in specs]

        async def client(index: int) -> None:
            await asyncio.sleep(rng.uniform(0, 1.5))
            await system.request(specs[index], histories[index])

        disturbing = asyncio.create_task(disturb(system, rng))
        await asyncio.gather(*(client(index) for index in range(NUM_STREAMS)))
        await disturbing
        for spec, history in zip(specs, histories, strict=True):
            check(history, [expected.token_ids for expected in expected_outputs(spec, layers)])
        await system.close()

    run_virtual(main())


def test_no_stream_loses_doubles_or_changes_a_token(chaos_seed: int) -> None:
    run_seed(chaos_seed)


def test_nor_does_one_of_a_model_with_states(chaos_seed: int) -> None:
    run_seed(chaos_seed, has_states=True)


def test_nor_does_one_of_a_model_whose_windowed_layers_lie_apart(chaos_seed: int) -> None:
    run_seed(chaos_seed, has_groups=True)
