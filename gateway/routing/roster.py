"""Which workers the gateway keeps connected to, as the registry's list changes.

The list says where to look, and nothing more. A worker that is on it no more but whose connection
stands is kept, so a registry that was lost, or lost its memory, costs no request anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

from baton.registry import Registry, WorkerAdded, WorkerRemoved
from baton.types import Tier
from gateway.routing.fleet import Fleet
from gateway.routing.workers import keep_connected


class Connect(Protocol):
    """As gateway.routing.workers.keep_connected."""

    def __call__(
        self, fleet: Fleet, address: str, /, *, is_wanted: Callable[[], bool]
    ) -> Awaitable[None]: ...


class Roster:
    """Owns one task per address, from its listing until it is neither listed nor connected."""

    def __init__(self, fleet: Fleet, *, connect: Connect = keep_connected) -> None:
        self._fleet = fleet
        self._connect = connect
        self._listed: dict[str, Tier] = {}

    async def follow(self, registry: Registry) -> None:
        """Keep the fleet as the registry lists it, until cancelled."""
        async with asyncio.TaskGroup() as group, aclosing(registry.changes()) as changes:
            async for change in changes:
                self._take(change, group)

    def _take(self, change: WorkerAdded | WorkerRemoved, group: asyncio.TaskGroup) -> None:
        match change:
            case WorkerAdded(address, tier):
                self._listed[address] = tier
                if address not in self._fleet.workers:
                    self._start(address, group)
            case WorkerRemoved(address):
                self._listed.pop(address, None)

    def _start(self, address: str, group: asyncio.TaskGroup) -> None:
        self._fleet.add(address, self._listed[address])
        group.create_task(self._keep(address, self._listed[address], group))

    async def _keep(self, address: str, tier: Tier, group: asyncio.TaskGroup) -> None:
        await self._connect(
            self._fleet, address, is_wanted=lambda: self._listed.get(address) is tier
        )
        self._fleet.remove(address)
        if address in self._listed:  # by now as one of the other tier
            self._start(address, group)
