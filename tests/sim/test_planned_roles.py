"""The planner under faults: two gateways plan, the registry that gives them the lease comes and
goes, orders get lost, workers die in the act. No stream notices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from baton.errors import InvalidRequest, WorkerLost
from baton.types import NO_SLO, Role, Sampling, SequenceSpec
from engine.oracle import oracle_tokens
from gateway.routing.planner import steering
from gateway.routing.planner.planner import Decision
from gateway.routing.planner.replay import Load
from gateway.routing.planner.shapes import WorkerFacts, roles_in, shapes_of
from gateway.routing.planner.steering import Decide, Steering
from tests.support.sim_system import History, System, WorkerNode
from tests.support.sim_tiers import SimShape
from tests.support.virtual_loop import run_virtual
from worker_core.commands import SetPolicy
from worker_core.policy import policy_of

NUM_REQUESTS = 30
VOCAB = 1000


class Registry:
    """Gives terms to one gateway at a time; it is away sometimes, and forgets who leads."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.holder: Holder | None = None
        self.term = 0

    def term_of(self, gateway: Holder) -> int | None:
        if self.rng.random() < 0.2:
            self.holder = None
        if self.rng.random() < 0.2 or self.holder not in (None, gateway):
            return None
        if self.holder is None:
            self.holder, self.term = gateway, self.term + 1
        return self.term


class Holder:
    """Implements Lease."""

    lasts_s = 10.0

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    async def hold(self) -> int | None:
        return self.registry.term_of(self)

    async def record(self, number: int | None) -> int | None:
        return number or 0

    async def close(self) -> None:
        pass


class Gateway:
    """Plans for a system: any shape, at any time."""

    def __init__(self, system: System, registry: Registry, terms: dict[str, int]) -> None:
        self.system, self.rng, self.terms = system, registry.rng, terms
        lease = Holder(registry)
        self.steering = Steering(
            system.fleet, system.dispatcher.log, lease, self.set_role, self.draw
        )
        self.task = asyncio.create_task(self.steering.run())

    async def draw(
        self,
        decide: Decide,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
        workers: Sequence[WorkerFacts],
        load: Load | None,  # noqa: ARG002
    ) -> Decision:
        """Decides late, and badly."""
        await asyncio.sleep(self.rng.uniform(0.0, 1.0))
        shape = self.rng.choice([*shapes_of(workers)])
        return Decision(roles_in(shape, workers) if workers else {})

    async def set_role(self, address: str, role: Role, term: int) -> None:
        """As a worker does; an order, or its answer, may be lost."""
        await asyncio.sleep(self.rng.uniform(0.0, 0.2))
        node = node_of(self.system, address)
        if node.is_dead or self.rng.random() < 0.1:
            raise WorkerLost(f"{address} does not answer")
        if term < self.terms.get(address, 0):
            raise InvalidRequest("term is over")
        self.terms[address] = term
        node.worker.submit(SetPolicy(policy_of(role, node.worker.engine.spec, NO_SLO)))
        if self.rng.random() < 0.1:
            raise WorkerLost(f"{address} does not answer")


def node_of(system: System, address: str) -> WorkerNode:
    return next(node for node in (*system.prefills, *system.decodes) if node.name == address)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_stream_notices_a_planner_and_what_happens_to_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steering, "PERIOD_S", 0.3)

    async def main() -> None:
        shape = SimShape(num_blocks=80)
        system = System(seed, num_prefill=3, num_decode=3, decode_shape=shape, prefill_shape=shape)
        rng = random.Random(seed)
        terms: dict[str, int] = {}
        registry = Registry(rng)
        gateways = [Gateway(system, registry, terms) for _ in range(2)]
        histories, requests = [], []
        specs = [
            SequenceSpec(
                f"r{number}",
                tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))),
                Sampling(temperature=0.7, seed=number, max_tokens=rng.randint(1, 60)),
                arrival_ns=number,
            )
            for number in range(NUM_REQUESTS)
        ]
        for number, spec in enumerate(specs):
            history = History()
            histories.append(history)
            requests.append(asyncio.create_task(system.request(spec, history)))
            await asyncio.sleep(rng.uniform(0, 1.0))
            if number == NUM_REQUESTS // 4:
                await node_of(system, "p0").kill()
            if number == NUM_REQUESTS // 2:
                gateways[0].task.cancel()
                await node_of(system, rng.choice(["p1", "d1"])).kill()
        await asyncio.gather(*requests)
        assert sum(gateway.steering.num_changes for gateway in gateways) > 3
        for spec, history in zip(specs, histories, strict=True):
            assert history.error is None
            history.check([oracle_tokens(spec.prompt_token_ids, spec.sampling, VOCAB)])
        for gateway in gateways:
            gateway.task.cancel()
        await asyncio.gather(*(g.task for g in gateways), return_exceptions=True)
        await system.close()

    run_virtual(main())
