"""Messages on their way for any time, in both directions, while workers drain, die, preempt and
lose what they send."""

from __future__ import annotations

import asyncio
import random

import pytest

from gateway.request import state
from tests.support.fake_workers import expected_outputs
from tests.support.gateway_world import Client, World, gateway_world, make_spec
from tests.support.virtual_loop import run_virtual


def disturb(world: World, rng: random.Random) -> None:
    """Do something to one worker."""
    decode = rng.choice(world.decodes)
    others = [other for other in world.decodes if other is not decode]
    match rng.choice(["drain", "drain", "end", "kill", "preempt", "transfers", "pauses", "mute"]):
        case "drain" if not any(other.is_draining for other in others):
            decode.drain()
        case "end":
            decode.is_draining = False
            decode._report()
        case "kill" if len(decode.links) == 1:
            decode.go_down()
            asyncio.get_running_loop().call_later(0.2, decode.come_up)
        case "preempt":
            decode.preempt(rng.randrange(3))
        case "transfers":
            decode.loses_transfers = not decode.loses_transfers
        case "pauses":
            decode.ignores_pauses = not decode.ignores_pauses
        case "mute":
            decode.transfer_s = rng.uniform(0.0, 0.4)


async def serve(world: World, rng: random.Random) -> None:
    specs = [
        make_spec(f"r{i}", arrival_ns=i, seed=i, num_choices=rng.choice([1, 1, 3]), max_tokens=40)
        for i in range(6)
    ]
    clients = [Client(read_s=rng.choice([0.0, 0.0, 0.01, 0.15])) for _ in specs]
    requests = [
        asyncio.create_task(world.generate(spec, client))
        for spec, client in zip(specs, clients, strict=True)
    ]
    given_up = rng.choice(requests)
    asyncio.get_running_loop().call_later(rng.uniform(0.0, 1.0), given_up.cancel)
    for _ in range(rng.randrange(12)):
        await asyncio.sleep(rng.uniform(0.0, 0.15))
        disturb(world, rng)
    await asyncio.wait(requests)
    for spec, client, request in zip(specs, clients, requests, strict=True):
        if request is given_up and request.cancelled():
            continue
        request.result()
        assert client.outputs() == expected_outputs(spec)


@pytest.mark.parametrize("seed", range(60))
def test_streams_are_whole_whatever_overtakes_what(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "PAUSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(state, "HANDOFF_TIMEOUT_S", 0.3)
    rng = random.Random(seed)

    async def main() -> None:
        async with gateway_world(num_prefills=2, num_decodes=3, num_blocks=100) as world:
            for decode in world.decodes:
                slow = rng.choice([0.0, 0.002, 0.05])
                decode.latency = lambda slow=slow: rng.uniform(0.0, slow)  # type: ignore[misc]
            await serve(world, rng)
            await world.settle()
            world.check_empty()

    run_virtual(main())
