"""Whole systems of workers that have ranks with KV channels of their own: a lost, doubled or late
part of a handoff would change tokens, leak a block or leave a stream without an end."""

from __future__ import annotations

import asyncio
import random

import pytest

from engine.oracle import OracleLayers, oracle_tokens
from tests.sim.test_system_mix import VOCAB, check, draw_wish, serve
from tests.support.pairwise import pairwise
from tests.support.sim_system import System
from tests.support.sim_tiers import SimShape
from tests.support.virtual_loop import run_virtual

WINDOWS = OracleLayers(6)


@pytest.mark.slow
@pairwise(
    layers=[OracleLayers(), WINDOWS],
    ranks=[(1, 2), (4, 1), (2, 4)],
    fault=["none", "drain", "kill"],
)
def test_streams_are_those_of_an_undisturbed_request(
    ranks: tuple[int, int], fault: str, layers: OracleLayers
) -> None:
    async def disturb(system: System, rng: random.Random) -> None:
        await asyncio.sleep(rng.uniform(0.2, 1.2))
        node = system.decodes[0]
        if fault == "drain":
            node.drain()
        if fault == "kill":
            await node.kill()

    def shape_of(num_kv_ranks: int, block_size: int) -> SimShape:
        return SimShape(
            block_size=block_size,
            layers=layers,
            has_window_slots=bool(layers.window),
            num_kv_ranks=num_kv_ranks,
            max_local_prefill_tokens=4,
            min_fetched_tokens=4,
        )

    async def main() -> None:
        system = System(
            3,
            num_prefill=2,
            num_decode=2,
            prefill_shape=shape_of(ranks[0], 8),
            decode_shape=shape_of(ranks[1], 4),
        )
        wishes = [draw_wish(system.rng, index) for index in range(14)]
        disturbing = asyncio.create_task(disturb(system, system.rng))
        histories = await serve(system, wishes, num_cancels=4)
        await disturbing
        for wish, history in zip(wishes, histories, strict=True):
            assert history.error is None
            spec = wish.spec
            if not layers.window:
                check(wish, history)
            elif wish.num_returned == spec.num_choices and spec.sampling.beam is None:
                history.check(
                    [
                        oracle_tokens(
                            spec.prompt_token_ids, spec.sampling, VOCAB, choice, layers=layers
                        )
                        for choice in range(spec.num_choices)
                    ]
                )
        await system.close()

    run_virtual(main())
