"""Everything at once under a virtual clock: whatever happens to workers and clients, streams are
right or end with an error."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from baton.errors import NoWorkers, Overloaded, WorkerLost
from baton.types import Sampling, SequenceSpec
from engine.oracle import FULL_LAYERS, OracleLayers, oracle_tokens
from tests.support.sim_system import History, System
from tests.support.sim_tiers import GROUPS, KV, STATES, SimShape
from tests.support.virtual_loop import run_virtual

VOCAB = 1000


def draw_spec(rng: random.Random, index: int) -> SequenceSpec:
    prefix = [[1] * 20, [2] * 9, []][rng.randrange(3)]
    prompt = (*prefix, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))))
    sampling = Sampling(
        temperature=rng.choice([0.0, 0.7]),
        seed=rng.getrandbits(64),
        presence_penalty=rng.choice([0.0, 0.5]),
        max_tokens=rng.randint(1, 30),
        stop_token_ids=frozenset(rng.sample(range(VOCAB), 20)),
    )
    num_choices = rng.choice([1, 1, 1, 2, 4])
    return SequenceSpec(f"r{index}", prompt, sampling, arrival_ns=index, num_choices=num_choices)


def expected(spec: SequenceSpec, layers: OracleLayers = FULL_LAYERS) -> list[list[int]]:
    """Expected tokens of each choice."""
    return [
        oracle_tokens(spec.prompt_token_ids, spec.sampling, VOCAB, choice, layers=layers)
        for choice in range(spec.num_choices)
    ]


async def serve(
    system: System, specs: list[SequenceSpec], *, num_cancels: int = 0, kills: tuple[str, ...] = ()
) -> list[History]:
    """Requests at random moments, some cancelled at random moments, workers killed at random
    moments."""
    rng = system.rng
    histories = [History() for _ in specs]

    async def client(spec: SequenceSpec, history: History) -> None:
        try:
            await asyncio.sleep(rng.uniform(0, 1.0))
        except asyncio.CancelledError:
            history.is_cancelled = True
            raise
        await system.request(spec, history)

    async def cancel(task: asyncio.Task[None]) -> None:
        await asyncio.sleep(rng.uniform(0, 2.0))
        task.cancel()

    async def kill(name: str) -> None:
        await asyncio.sleep(rng.uniform(0.1, 1.5))
        nodes = {node.name: node for node in (*system.prefills, *system.decodes)}
        await nodes[name].kill()

    clients = [
        asyncio.create_task(client(spec, history))
        for spec, history in zip(specs, histories, strict=True)
    ]
    others = [asyncio.create_task(cancel(task)) for task in rng.sample(clients, num_cancels)]
    others += [asyncio.create_task(kill(name)) for name in kills]
    await asyncio.gather(*clients, return_exceptions=True)
    await asyncio.gather(*others)
    await system.close()
    return histories


SHAPES = [
    pytest.param(SimShape(), SimShape(block_size=8), id="roomy"),
    pytest.param(SimShape(num_blocks=24), SimShape(block_size=7), id="decode-full"),
    pytest.param(SimShape(max_num_seqs=4), SimShape(num_blocks=18), id="few-places"),
    pytest.param(
        SimShape(num_blocks=30, max_local_prefill_tokens=12, max_num_batched_tokens=8),
        SimShape(max_num_batched_tokens=5),
        id="small-chunks",
    ),
    pytest.param(
        replace(STATES, num_blocks=40, max_num_seqs=4),
        replace(STATES, max_num_seqs=2, max_num_batched_tokens=5),
        id="states",
    ),
    pytest.param(replace(GROUPS, num_blocks=40), replace(GROUPS, block_size=8), id="groups"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("decode_shape", "prefill_shape"), SHAPES)
@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 3, 4, 5))]
)
def test_streams_are_whole_and_right_with_cancels_and_full_workers(
    seed: int, decode_shape: SimShape, prefill_shape: SimShape
) -> None:
    async def main() -> None:
        system = System(
            seed,
            num_prefill=1 + seed % 2,
            num_decode=1 + seed % 3,
            decode_shape=decode_shape,
            prefill_shape=prefill_shape,
        )
        specs = [draw_spec(system.rng, index) for index in range(24)]
        histories = await serve(system, specs, num_cancels=6)
        for spec, history in zip(specs, histories, strict=True):
            assert history.error is None
            history.check(expected(spec, decode_shape.layers))

    run_virtual(main())


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("kind", [KV, STATES, GROUPS], ids=["kv", "states", "groups"])
@pytest.mark.parametrize("killed", [("d0",), ("p0",), ("p0", "d1")])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
)
def test_streams_outlive_their_workers(seed: int, killed: tuple[str, ...], kind: SimShape) -> None:
    async def main() -> None:
        system = System(
            seed,
            num_prefill=2,
            num_decode=2,
            decode_shape=replace(kind, num_blocks=40),
            prefill_shape=replace(kind, block_size=8),
        )
        specs = [draw_spec(system.rng, index) for index in range(20)]
        histories = await serve(system, specs, num_cancels=3, kills=killed)
        for spec, history in zip(specs, histories, strict=True):
            assert history.error is None
            history.check(expected(spec, kind.layers))

    run_virtual(main())


def test_without_prefill_workers_decode_workers_prefill() -> None:
    async def main() -> None:
        system = System(1, num_prefill=1, num_decode=1)
        await system.prefills[0].kill()
        specs = [draw_spec(system.rng, index) for index in range(12)]
        histories = await serve(system, specs)
        for spec, history in zip(specs, histories, strict=True):
            assert history.error is None
            history.check(expected(spec))
        assert "LocalPrefill" in system.seen

    run_virtual(main())


def test_without_decode_workers_a_request_gets_an_error_soon() -> None:
    async def main() -> None:
        system = System(1)
        await system.decodes[0].kill()
        history = History()
        await system.request(draw_spec(system.rng, 0), history)
        assert isinstance(history.error, NoWorkers)
        assert history.error.retry_after_s
        assert asyncio.get_running_loop().time() < 1.0
        await system.close()

    run_virtual(main())


@pytest.mark.slow
def test_the_last_decode_worker_dies_in_mid_stream() -> None:
    async def main() -> None:
        system = System(3)
        endless = Sampling(max_tokens=200)
        specs = [SequenceSpec(f"r{i}", (i, 2, 3), endless, arrival_ns=i) for i in range(8)]
        histories = await serve(system, specs, kills=("d0",))
        for spec, history in zip(specs, histories, strict=True):
            assert history.error is None or isinstance(history.error, NoWorkers | WorkerLost)
            history.check(expected(spec))
        assert any(history.error for history in histories)

    run_virtual(main())


def test_a_full_queue_refuses_at_once_and_serves_what_it_took() -> None:
    async def main() -> None:
        system = System(5, max_queue_size=4, decode_shape=SimShape(max_num_seqs=4))
        specs = [draw_spec(system.rng, index) for index in range(12)]
        histories = [History() for _ in specs]
        await asyncio.gather(*(system.request(s, h) for s, h in zip(specs, histories, strict=True)))
        refused = [h for h in histories if h.error]
        assert len(refused) >= 6
        assert all(isinstance(h.error, Overloaded) and h.error.retry_after_s for h in refused)
        for spec, history in zip(specs, histories, strict=True):
            history.check(expected(spec))
        await system.close()

    run_virtual(main())
