"""Migrates running sequences: off draining workers, from full decode workers to empty ones, and off
prefill workers that decode while the decode tier is full.

The migrator decides; the reducer of each request carries a migration out. Few migrations run at
once, so that queued sequences keep decoding and the network keeps spare bandwidth.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from baton.types import Rank, SequenceSpec, Tier
from gateway.routing.dispatcher import Dispatcher
from gateway.routing.fleet import Fleet, Worker, WorkerState
from gateway.routing.placement import Placement
from gateway.routing.router import Running, rebalance

#: Maximum concurrent migrations of one gateway.
MAX_MIGRATIONS = 8

#: Minimum interval between two ticks, in seconds, unless a migration ends.
TICK_INTERVAL_S = 0.1

#: Seconds for which a sequence stays put after a migration, successful or not.
REST_S = 2.0


class Movable(Protocol):
    """One choice of a request, as the migrator sees it."""

    @property
    def is_movable(self) -> bool:
        """Whether it runs as a sequence of its own and no migration of it is under way."""
        ...

    @property
    def owner(self) -> Worker | None:
        """The worker that runs it, or None."""
        ...

    @property
    def rank(self) -> Rank: ...

    @property
    def account(self) -> bytes:
        """The account charged."""
        ...

    @property
    def spec(self) -> SequenceSpec:
        """The choice as a sequence of its own, with all known tokens."""
        ...

    def migrate(self, placement: Placement, on_end: Callable[[], None]) -> None:
        """Migrate to a claimed placement. `on_end` is called once, after success, failure or the
        end of the sequence."""
        ...


class Migrator:
    """Plans the migrations of one gateway. Sequences move only while `run` runs."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._wake = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._rest_until_s: dict[Movable, float] = {}
        """Earliest time of the next migration of each choice."""
        self._num_migrating = 0
        fleet.listen(self._wake.set)

    def add(self, choices: Iterable[Movable]) -> None:
        """Register choices for migration."""
        self._rest_until_s.update(dict.fromkeys(choices, 0.0))

    def remove(self, choices: Iterable[Movable]) -> None:
        """Unregister choices; their request is over or ending."""
        for choice in choices:
            self._rest_until_s.pop(choice, None)

    async def run(self) -> None:
        """Order migrations until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._has_ended.clear()
            self._tick(loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_INTERVAL_S):
                    await self._has_ended.wait()

    def _tick(self, now_s: float) -> None:
        if not self._rest_until_s or self._num_migrating >= MAX_MIGRATIONS:
            return
        self._fleet.broken_pairs.expire(now_s)
        workers = self._fleet.tier(Tier.DECODE)
        draining = [w for w in workers if w.state is WorkerState.DRAINING]
        staying = [w for w in self._fleet.ready(Tier.PREFILL) if w.num_homed]
        for worker in (*draining, *staying):
            self._empty(worker, now_s)
        if not self._num_migrating:
            self._even_out(self._fleet.ready(Tier.DECODE), now_s)

    def _empty(self, worker: Worker, now_s: float) -> None:
        """Migrate a worker's sequences elsewhere, best rank first, while there is room."""
        choices = self._movable(now_s)[worker.address]
        for choice in heapq.nsmallest(MAX_MIGRATIONS, choices, key=lambda c: c.rank):
            if worker.tier is Tier.PREFILL and self._dispatcher.keeps_last_place(now_s):
                return
            if not self._migrate(choice, worker.address, self._fleet.ready(Tier.DECODE)):
                return

    def _even_out(self, workers: Sequence[Worker], now_s: float) -> None:
        views = [worker.decode_view() for worker in workers if not worker.is_awaiting_report]
        short = [view.address for view in views if view.is_short]
        if not short:
            return
        by_address = self._movable(now_s)
        choices = [(address, choice) for address in short for choice in by_address[address]]
        running = [
            Running(key, address, choice.rank, choice.spec.num_tokens)
            for key, (address, choice) in enumerate(choices)
        ]
        for transfer in rebalance(views, running, MAX_MIGRATIONS):
            address, choice = choices[transfer.key]
            self._migrate(choice, address, [self._fleet.workers[transfer.address]])

    def _movable(self, now_s: float) -> dict[str, list[Movable]]:
        """Movable choices, by address of the worker that runs them."""
        by_address: dict[str, list[Movable]] = defaultdict(list)
        for choice, rest_until_s in self._rest_until_s.items():
            owner = choice.owner
            if owner is not None and rest_until_s <= now_s and choice.is_movable:
                by_address[owner.address].append(choice)
        return by_address

    def _migrate(self, choice: Movable, here: str, among: Sequence[Worker]) -> bool:
        """Order a migration. Return False without room, or at MAX_MIGRATIONS."""
        if self._num_migrating >= MAX_MIGRATIONS:
            return False
        reachable = [w for w in among if here not in self._fleet.barred_from(w.address)]
        placement = self._dispatcher.place_now(choice.spec, reachable, choice.account)
        if placement is None:
            return False
        self._num_migrating += 1
        choice.migrate(placement, partial(self._on_end, choice))
        return True

    def _on_end(self, choice: Movable) -> None:
        self._num_migrating -= 1
        if choice in self._rest_until_s:
            self._rest_until_s[choice] = asyncio.get_running_loop().time() + REST_S
        self._has_ended.set()
        self._wake.set()
