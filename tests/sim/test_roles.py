"""Workers change their roles under load: every stream goes on as if nothing had been, and nothing
is left behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.types import NO_SLO, Role, Sampling, SequenceSpec, Tier
from engine.oracle import oracle_tokens
from tests.support.sim_system import History, System, WorkerNode
from tests.support.sim_tiers import SimShape
from tests.support.virtual_loop import run_virtual
from worker_core.commands import SetPolicy
from worker_core.policy import policy_of

NUM_REQUESTS = 30
VOCAB = 1000
PREFILL, DECODE = Role(Tier.PREFILL), Role(Tier.DECODE)
ROLES = (PREFILL, DECODE, Role(Tier.DECODE, is_colocated=True))


def spec_of(rng: random.Random, number: int) -> SequenceSpec:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 60)))
    sampling = Sampling(temperature=0.7, seed=number, max_tokens=rng.randint(1, 40))
    return SequenceSpec(
        f"r{number}", prompt, sampling, arrival_ns=number, num_choices=rng.choice((1, 1, 2))
    )


def set_role(node: WorkerNode, role: Role) -> None:
    node.worker.submit(SetPolicy(policy_of(role, node.worker.engine.spec, NO_SLO)))


async def change_roles(system: System, num_changes: int) -> set[Role]:
    """Workers change roles at random; the decode tier is never without one. Returns the roles that
    were taken."""
    nodes = [*system.prefills, *system.decodes]
    taken: set[Role] = set()
    for _ in range(num_changes):
        await asyncio.sleep(system.rng.uniform(0.05, 0.4))
        node = system.rng.choice(nodes)
        decodes = system.fleet.ready(Tier.DECODE)
        worker = system.fleet.workers[node.name]
        others = [role for role in ROLES if role != Role(worker.tier, worker.load.is_colocated)]
        role = system.rng.choice(others)
        if role == PREFILL and len(decodes) < 2:
            continue
        taken.add(role)
        set_role(node, role)
        while Role(worker.tier, worker.load.is_colocated) != role:
            await asyncio.sleep(0.01)
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_stream_notices_that_workers_change_their_roles(seed: int) -> None:
    async def main() -> None:
        shape = SimShape(num_blocks=80)
        system = System(seed, num_prefill=2, num_decode=2, decode_shape=shape, prefill_shape=shape)
        await asyncio.sleep(0.1)
        changing = asyncio.create_task(change_roles(system, 16))
        histories, requests = [], []
        specs = [spec_of(system.rng, number) for number in range(NUM_REQUESTS)]
        for spec in specs:
            history = History()
            histories.append(history)
            requests.append(asyncio.create_task(system.request(spec, history)))
            await asyncio.sleep(system.rng.uniform(0, 0.1))
        await asyncio.gather(*requests)
        assert await changing == set(ROLES)
        for spec, history in zip(specs, histories, strict=True):
            assert history.error is None
            history.check(
                [
                    oracle_tokens(spec.prompt_token_ids, spec.sampling, VOCAB, choice)
                    for choice in range(spec.num_choices)
                ]
            )
        await system.close()

    run_virtual(main())


def test_a_worker_serves_the_tier_that_it_was_given() -> None:
    """The two tiers change places: the worker that was started to compute prompts runs sequences,
    and the others send it KV."""

    async def main() -> None:
        system = System(1, num_prefill=1, num_decode=1)
        await asyncio.sleep(0.1)
        (prefill,), (decode,) = system.prefills, system.decodes
        for node, role in ((prefill, DECODE), (decode, PREFILL)):
            set_role(node, role)
            while system.fleet.workers[node.name].tier is not role.tier:
                await asyncio.sleep(0.01)
        assert [worker.address for worker in system.fleet.ready(Tier.DECODE)] == [prefill.name]
        history, prompt = History(), tuple(range(50))
        sampling = Sampling(max_tokens=20)
        await system.request(SequenceSpec("r", prompt, sampling), history)
        history.check([oracle_tokens(prompt, sampling, VOCAB)])
        assert prefill.num_opened == decode.num_opened == 1
        assert decode.worker.core.step([]).load.role is Tier.PREFILL
        await system.close()

    run_virtual(main())


def test_while_all_are_colocated_no_kv_is_sent() -> None:
    """Prefill workers rest, and take part again once somebody takes KV."""

    async def main() -> None:
        system = System(1, num_prefill=1, num_decode=1)
        await asyncio.sleep(0.1)
        (prefill,), (decode,) = system.prefills, system.decodes
        for number, role in enumerate((ROLES[2], DECODE)):
            set_role(decode, role)
            while system.fleet.workers["d0"].load.is_colocated != role.is_colocated:
                await asyncio.sleep(0.01)
            history, prompt = History(), tuple(range(100 * number, 100 * number + 50))
            sampling = Sampling(max_tokens=1)  # a prefill worker could serve it alone
            await system.request(SequenceSpec(f"r{number}", prompt, sampling), history)
            history.check([oracle_tokens(prompt, sampling, VOCAB)])
            assert prefill.num_opened == number
        await system.close()

    run_virtual(main())
