"""The number of workers under faults: leaders die and come, the registry forgets, workers die while
they start and while they drain. No stream notices, and the number converges."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from baton.types import Sampling, SequenceSpec, Tier
from engine.oracle import oracle_tokens
from gateway.routing.planner import size, steering
from gateway.routing.planner.planner import Decision, Planner
from gateway.routing.planner.shapes import Shape, WorkerFacts, num_decoding, shapes_of
from gateway.routing.planner.size import Bounds
from gateway.routing.planner.steering import Decide, Steering
from tests.sim.test_planned_roles import VOCAB, Gateway, Holder, Registry
from tests.support.sim_system import DecodeNode, History, System, WorkerNode
from tests.support.sim_tiers import SimShape
from tests.support.virtual_loop import run_virtual

NUM_REQUESTS, LEAST, MOST = 60, 2, 6


class NumberedRegistry(Registry):
    """Keeps a number, too, and loses it with all else."""

    number = 0


class NumberedHolder(Holder):
    registry: NumberedRegistry

    async def record(self, number: int | None) -> int | None:
        registry = self.registry
        if registry.rng.random() < 0.1 or registry.holder is not self:
            return None
        registry.number = registry.number if number is None else number
        return registry.number


class ScalingGateway(Gateway):
    """Plans for a system: roles of any shape, and the number by the planner's own rules."""

    def __init__(self, system: System, registry: NumberedRegistry, terms: dict[str, int]) -> None:
        self.system, self.rng, self.terms = system, registry.rng, terms
        self.steering = Steering(
            system.fleet,
            system.dispatcher.log,
            NumberedHolder(registry),
            self.set_role,
            self.late,
            bounds=Bounds(LEAST, MOST),
        )
        self.task = asyncio.create_task(self.steering.run())

    async def late(self, decide: Decide, now_s: float, workers: Any, load: Any) -> Decision:
        planner: Planner = decide.__self__  # type: ignore[attr-defined]
        assert planner._size is not None
        before = planner._size.said
        decision = decide(now_s, workers, load)
        number = decision.num_workers
        if number is not None and number < (len(workers) if before is None else before):
            num_leaving = len(workers) - number
            assert num_leaving <= 0 or num_decoding(w.role for w in workers) > num_leaving
        await asyncio.sleep(self.rng.uniform(0.0, 0.5))
        return decision


class Scaler:
    """Starts and drains workers as a StatefulSet does, by the greatest number that is published.
    Some die while they start, some while they drain."""

    def __init__(self, system: System, gateways: Sequence[Gateway], rng: random.Random) -> None:
        self.system, self.gateways, self.rng = system, gateways, rng
        self.present: list[WorkerNode] = [*system.prefills, *system.decodes]
        self.num_starting = self.num_started = self.num_drained = 0
        self.has_faults = True
        self.tasks = [asyncio.create_task(self.run())]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            said = [n for g in self.gateways if (n := g.steering.num_workers) is not None]
            self.present = [node for node in self.present if not node.is_dead]
            if not said:
                continue
            number = len(self.present) + self.num_starting
            for _ in range(max(said) - number):
                self.num_starting += 1
                self.tasks.append(asyncio.create_task(self.start()))
            if self.present and max(said) < number:
                self.tasks.append(asyncio.create_task(self.leave(self.present.pop())))

    async def start(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.2, 2.0))
        self.num_starting -= 1
        self.num_started += 1
        name = f"d{10 + self.num_started}"
        self.system.fleet.add(name, Tier.DECODE)
        node = DecodeNode(self.system, name)
        self.system.decodes.append(node)
        self.present.append(node)
        if self.has_faults and self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.uniform(0.0, 0.1))
            await node.kill()

    async def leave(self, node: WorkerNode) -> None:
        node.drain()
        if self.has_faults and self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.uniform(0.0, 1.0))
            await node.kill()
            return
        while node.sinks or self.system.fleet.workers[node.name].num_in_flight:
            await asyncio.sleep(0.1)
        self.num_drained += 1
        await node.kill()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_stream_notices_that_workers_come_and_go(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = {"number": LEAST}
    rng = random.Random(seed)

    def any_shape(
        _planner: Planner, workers: Sequence[WorkerFacts], _load: object, _present: object
    ) -> Shape:
        return rng.choice([*shapes_of(workers)])

    monkeypatch.setattr(steering, "PERIOD_S", 0.3)
    monkeypatch.setattr(size, "SPARE_S", 0.8)
    monkeypatch.setattr(size, "_STARTS", 0.0)
    monkeypatch.setattr(Planner, "_best", any_shape)
    monkeypatch.setattr(Planner, "_needed", lambda *_: needed["number"])

    async def main() -> None:
        shape = SimShape(num_blocks=80)
        system = System(seed, num_prefill=1, num_decode=2, decode_shape=shape, prefill_shape=shape)
        terms: dict[str, int] = {}
        registry = NumberedRegistry(rng)
        gateways = [ScalingGateway(system, registry, terms) for _ in range(3)]
        scaler = Scaler(system, gateways, rng)
        histories, requests, specs = [], [], []
        for number in range(NUM_REQUESTS):
            spec = SequenceSpec(
                f"r{number}",
                tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))),
                Sampling(temperature=0.7, seed=number, max_tokens=rng.randint(1, 60)),
                arrival_ns=number,
            )
            specs.append(spec)
            histories.append(History())
            requests.append(asyncio.create_task(system.request(spec, histories[-1])))
            await asyncio.sleep(rng.uniform(0, 1.0))
            if number % 10 == 5:
                needed["number"] = rng.randint(LEAST, MOST)
            if number in (NUM_REQUESTS // 3, 2 * NUM_REQUESTS // 3):
                # The leader, if there is one.
                leads = [g for g in gateways if g.steering.num_workers is not None]
                (leads or gateways)[0].task.cancel()
                registry.holder = None
        needed["number"] = 3
        await asyncio.gather(*requests)
        scaler.has_faults = False
        await asyncio.sleep(60.0)
        assert scaler.num_started > 2
        assert scaler.num_drained > 0
        assert {g.steering.num_workers for g in gateways} <= {3, None}
        assert len([node for node in scaler.present if not node.is_dead]) == 3
        for spec, history in zip(specs, histories, strict=True):
            assert history.error is None
            history.check([oracle_tokens(spec.prompt_token_ids, spec.sampling, VOCAB)])
        for task in (*(gateway.task for gateway in gateways), *scaler.tasks):
            task.cancel()
        await asyncio.gather(*scaler.tasks, return_exceptions=True)
        await asyncio.gather(*(g.task for g in gateways), return_exceptions=True)
        await system.close()

    run_virtual(main())
