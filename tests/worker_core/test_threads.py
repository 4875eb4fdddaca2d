"""Threads that change while a worker runs, and costs that go with them."""

from __future__ import annotations

import asyncio

import pytest

from baton.config import PrefillOptions
from baton.errors import ConfigError
from baton.types import StepCosts
from prefill_svc.server import serve_prefill
from worker_core.build import threads_of
from worker_core.costs import Costs
from worker_core.policy import pinned_local_prefill
from worker_core.threads import Threads


def test_threads_change_only_where_that_is_asked() -> None:
    numbers: list[int] = []
    threads = Threads(2, numbers.append)
    for wanted in (0, 2, 4, 4, 0):
        threads.use(wanted)
    assert numbers == [4, 2]
    assert threads.num_now == 2


@pytest.mark.parametrize(("node", "can_change"), [(None, True), (-1, True), (0, False)])
def test_a_worker_kept_to_a_node_keeps_its_number_of_threads(
    node: int | None, can_change: bool
) -> None:
    """More would be more than its cores."""
    options = PrefillOptions(model="m", device="cpu", numa_node=node)
    assert (threads_of(options) is not None) == can_change


async def test_a_worker_does_not_start_on_a_node_that_it_may_not_use() -> None:
    options = PrefillOptions(model="m", engine="oracle", numa_node=1023)
    stop = asyncio.Event()
    stop.set()
    with pytest.raises(ConfigError, match="numa_node=1023"):
        await serve_prefill(options, stop, lambda _: None)


def test_costs_of_each_number_of_threads_are_kept_apart() -> None:
    costs = Costs(pinned_local_prefill(0), token_bytes=1)
    costs.num_threads = 1
    for number in range(1, 9):
        costs.observe_step(number, 0, 0.010 + 0.001 * number)
        costs.observe_step(0, 100 * number, 0.005 + 0.1 * number)
    of_one = costs.of_steps()
    assert all(
        abs(seen - true) < 1e-9
        for seen, true in zip(
            (of_one.step_s, of_one.sequence_s, of_one.prompt_s, of_one.token_s),
            (0.010, 0.001, 0.005, 0.001),
            strict=True,
        )
    )
    costs.num_threads = 2
    assert costs.of_steps() == StepCosts(), "nothing measured yet"
    costs.num_threads = 1
    assert costs.of_steps() == of_one
