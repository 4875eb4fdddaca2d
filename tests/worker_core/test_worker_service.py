"""Roles by gRPC: what a worker takes, and what it refuses."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.types import Role, Tier, WorkerLoad
from baton.v1 import worker_pb2
from tests.support.fake_workers import make_info
from worker_core.commands import Command, SetPolicy
from worker_core.loop import Heartbeat, LoadBoard
from worker_core.policy import Policy, prefill_policy
from worker_core.worker_service import WorkerServicer


class Context:
    """Of a call with time enough."""

    def time_remaining(self) -> float:
        return 60.0


class Worker:
    """A worker that takes any role at the next turn of the event loop."""

    def __init__(self, num_threads: int = 0) -> None:
        self.num_started = num_threads
        self.board = LoadBoard()
        self.roles: list[Role] = []
        self.threads: list[int] = []
        info = replace(make_info("w", Tier.PREFILL), num_threads=num_threads)
        self.service = WorkerServicer(
            info, self.board, Heartbeat(1.0), self._submit, self._policy_of
        )

    def _policy_of(self, role: Role) -> Policy:
        self.roles.append(role)
        return prefill_policy()

    def _submit(self, command: Command) -> None:
        assert isinstance(command, SetPolicy)
        self.threads.append(command.num_threads)
        role, started = self.roles[-1], self.num_started
        load = WorkerLoad(
            role=role.tier,
            is_colocated=role.is_colocated,
            num_threads=started and (role.num_threads or started),
        )
        asyncio.get_running_loop().call_soon(self.board.publish, load)

    async def set_role(self, **fields: Any) -> None:
        context: Any = Context()
        await self.service.SetRole(worker_pb2.SetRoleRequest(**fields), context)


async def test_a_role_says_tier_prompts_and_threads() -> None:
    worker = Worker()
    await worker.set_role(role=worker_pb2.TIER_DECODE, is_colocated=True, num_threads=4)
    await worker.set_role(role=worker_pb2.TIER_PREFILL)
    assert worker.roles == [Role(Tier.DECODE, True, 4), Role(Tier.PREFILL)]
    assert worker.threads == [4, 0]


async def test_an_order_is_answered_once_the_worker_has_the_role() -> None:
    """Also where nothing else of its load changes: only the kind of a decode worker, or threads."""
    worker = Worker(num_threads=2)
    async with asyncio.timeout(5.0):
        for is_colocated, asked, has in ((False, 0, 2), (True, 0, 2), (True, 4, 4), (True, 0, 2)):
            await worker.set_role(
                role=worker_pb2.TIER_DECODE, is_colocated=is_colocated, num_threads=asked
            )
            load = worker.board.load
            assert (load.is_colocated, load.num_threads) == (is_colocated, has)


async def test_more_threads_than_a_system_starts_are_refused() -> None:
    worker = Worker(num_threads=2)
    with pytest.raises(InvalidRequest, match="num_threads: 2000000000 is too many; give at most"):
        await worker.set_role(role=worker_pb2.TIER_DECODE, num_threads=2_000_000_000)
    assert not worker.roles


async def test_a_planner_of_an_earlier_term_is_refused_and_a_person_is_not() -> None:
    worker = Worker()
    await worker.set_role(role=worker_pb2.TIER_DECODE, term=7)
    await worker.set_role(role=worker_pb2.TIER_DECODE, term=7)
    with pytest.raises(InvalidRequest, match="term: 6 is over"):
        await worker.set_role(role=worker_pb2.TIER_PREFILL, term=6)
    await worker.set_role(role=worker_pb2.TIER_PREFILL)
    assert len(worker.roles) == 3


async def test_a_term_far_ahead_of_the_clock_does_not_lock_planners_out() -> None:
    worker = Worker()
    with pytest.raises(InvalidRequest, match="more than a day ahead"):
        await worker.set_role(role=worker_pb2.TIER_PREFILL, term=2**64 - 1)
    await worker.set_role(role=worker_pb2.TIER_PREFILL, term=int(1e3 * time.time()) + 60_000)
    assert len(worker.roles) == 1
