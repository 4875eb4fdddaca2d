"""Moves running sequences between workers: away from those that drain, from full decode workers to
roomy ones, and from prefill workers, which decode on while the decode tier is full.

It decides and orders; the reducer of each request's life carries an order out. Few migrations are
under way at once, so that those that wait for theirs run on, and the network is not all theirs.
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

#: Migrations of one gateway that are under way at once.
MAX_MIGRATIONS = 8

#: Shortest time between two ticks, in seconds, unless a migration has ended meanwhile.
TICK_INTERVAL_S = 0.1

#: After a migration, whatever came of it, its sequence is left alone for this long, in seconds.
REST_S = 2.0


class Movable(Protocol):
    """One choice of a request."""

    @property
    def is_movable(self) -> bool:
        """Whether it runs as a sequence of its own, and is not under way already."""
        ...

    @property
    def owner(self) -> Worker | None:
        """The worker that runs it, if any does."""
        ...

    @property
    def rank(self) -> Rank: ...

    @property
    def spec(self) -> SequenceSpec:
        """As a sequence of its own, with the tokens that are known."""
        ...

    def migrate(self, placement: Placement, on_end: Callable[[], None]) -> None:
        """Move to a place that was claimed. `on_end` is called once: there, or here again, or gone
        from both."""
        ...


class Migrator:
    """Of one gateway. `run` must be running for anything to be moved."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._wake = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._rest_until_s: dict[Movable, float] = {}
        """All there are, and until when each is left alone."""
        self._num_migrating = 0
        fleet.listen(self._wake.set)

    def add(self, choices: Iterable[Movable]) -> None:
        """Have them moved when there is reason to."""
        self._rest_until_s.update(dict.fromkeys(choices, 0.0))

    def remove(self, choices: Iterable[Movable]) -> None:
        """Their request is over, or about to be."""
        for choice in choices:
            self._rest_until_s.pop(choice, None)

    async def run(self) -> None:
        """Order migrations, for ever."""
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
        """Move what is on a worker elsewhere, best rank first, as far as there is room."""
        choices = self._movable(now_s)[worker.address]
        for choice in heapq.nsmallest(MAX_MIGRATIONS, choices, key=lambda c: c.rank):
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
        """By the addresses of the workers that run them."""
        by_address: dict[str, list[Movable]] = defaultdict(list)
        for choice, rest_until_s in self._rest_until_s.items():
            owner = choice.owner
            if owner is not None and rest_until_s <= now_s and choice.is_movable:
                by_address[owner.address].append(choice)
        return by_address

    def _migrate(self, choice: Movable, here: str, among: Sequence[Worker]) -> bool:
        """Order a migration; False if there is no room for it, or there are too many."""
        if self._num_migrating >= MAX_MIGRATIONS:
            return False
        reachable = [w for w in among if here not in self._fleet.barred_from(w.address)]
        placement = self._dispatcher.place_now(choice.spec, reachable)
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
