"""Roles in a shape: as many as it says, on no more cores than there are, with few changes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.types import Role, Tier
from gateway.routing.planner.shapes import Shape, WorkerFacts, roles_in, shapes_of

ROLES = st.sampled_from([Role(Tier.PREFILL), Role(Tier.DECODE), Role(Tier.DECODE, True)])


@st.composite
def fleets(draw: st.DrawFn) -> list[WorkerFacts]:
    return [
        WorkerFacts(
            f"h{number % 3}:{number}",
            f"h{number % 3}",
            draw(st.sampled_from(list(Tier))),
            draw(ROLES),
            draw(st.sampled_from([0, 1, 4])),
        )
        for number in range(draw(st.integers(1, 20)))
    ]


@given(workers=fleets())
def test_every_shape_has_the_workers_that_it_says(workers: list[WorkerFacts]) -> None:
    for shape in shapes_of(workers):
        roles = roles_in(shape, workers)
        assert roles.keys() == {worker.address for worker in workers}
        decodes = [role for role in roles.values() if role.tier is Tier.DECODE]
        assert decodes
        assert all(role.is_colocated == (shape.num_prefill == 0) for role in decodes)
        if shape.num_prefill:
            assert len(roles) - len(decodes) == shape.num_prefill


@given(workers=fleets())
def test_no_host_computes_with_more_threads_than_it_has(workers: list[WorkerFacts]) -> None:
    roles = roles_in(Shape(0), workers)
    for host in {worker.host for worker in workers}:
        here = [worker for worker in workers if worker.host == host and worker.num_threads]
        at_work = [worker for worker in here if roles[worker.address].tier is Tier.DECODE]
        used = sum(roles[w.address].num_threads or w.num_threads for w in at_work)
        assert used == sum(worker.num_threads for worker in here)


@given(workers=fleets())
def test_what_has_a_shape_keeps_it(workers: list[WorkerFacts]) -> None:
    for shape in shapes_of(workers):
        roles = roles_in(shape, workers)
        changed = [replace(worker, role=roles[worker.address]) for worker in workers]
        assert roles_in(shape, changed) == roles


def test_a_large_fleet_is_compared_in_few_splits() -> None:
    workers = [WorkerFacts(f"w{i}", f"w{i}", Tier.DECODE, Role(Tier.DECODE)) for i in range(1000)]
    assert len([*shapes_of(workers)]) <= 9
