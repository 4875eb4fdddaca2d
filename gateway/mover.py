"""Moves running sequences between decode workers: away from those that drain, and from full ones to roomy ones.

It decides and orders; movable_seat.py carries an order out. Few moves are under way at once, so that those that wait for
theirs run on, and the network is not all theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from baton.types import Tier
from gateway.dispatcher import Dispatcher
from gateway.fleet import Fleet, Worker, WorkerState
from gateway.movable_seat import MovableSeat
from gateway.rebalance import Memory, Sitting, rebalance

#: Moves of one gateway that are under way at once.
MAX_MOVES = 8

#: Shortest time between two looks at the fleet, in seconds, unless a move has ended meanwhile.
LOOK_INTERVAL_S = 0.1

#: After a move that came to nothing, its sequence is left alone for this long, in seconds.
REST_S = 2.0


class Mover:
    """Of one gateway. `run` must be running for anything to be moved."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._wake = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._rest_until_s: dict[MovableSeat, float] = {}
        """All seats, and until when each is left alone."""
        self._num_moving = 0
        fleet.listen(self._wake.set)

    def add(self, seat: MovableSeat) -> None:
        """Have a seat moved when there is reason to."""
        self._rest_until_s[seat] = 0.0

    def remove(self, seat: MovableSeat) -> None:
        """The seat is about to be closed, or was."""
        self._rest_until_s.pop(seat, None)

    async def run(self) -> None:
        """Order moves, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._has_ended.clear()
            self._look(loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_INTERVAL_S):
                    await self._has_ended.wait()

    def _look(self, now_s: float) -> None:
        if not self._rest_until_s or self._num_moving >= MAX_MOVES:
            return
        self._fleet.broken_pairs.expire(now_s)
        workers = self._fleet.tier(Tier.DECODE)
        draining = [w for w in workers if w.state is WorkerState.DRAINING]
        for worker in draining:
            self._empty(worker, now_s)
        if not self._num_moving:
            self._even_out(self._fleet.ready(Tier.DECODE), now_s)

    def _empty(self, worker: Worker, now_s: float) -> None:
        """Move what is on a worker elsewhere, best rank first, as far as there is room."""
        seats = self._movable(now_s)[worker.address]
        for seat in heapq.nsmallest(MAX_MOVES, seats, key=lambda s: s.passenger.rank):
            if not self._move(seat, self._fleet.ready(Tier.DECODE)):
                return

    def _even_out(self, workers: Sequence[Worker], now_s: float) -> None:
        memories = [_memory_of(worker) for worker in workers if not worker.is_awaiting_report]
        short = [memory.address for memory in memories if memory.is_short]
        if not short:
            return
        by_address = self._movable(now_s)
        seats = [seat for address in short for seat in by_address[address]]
        sittings = [
            Sitting(key, _address_of(seat), seat.passenger.rank, seat.passenger.num_tokens)
            for key, seat in enumerate(seats)
        ]
        for transfer in rebalance(memories, sittings, MAX_MOVES):
            self._move(seats[transfer.key], [self._fleet.workers[transfer.address]])

    def _movable(self, now_s: float) -> dict[str, list[MovableSeat]]:
        by_address: dict[str, list[MovableSeat]] = defaultdict(list)
        for seat, rest_until_s in self._rest_until_s.items():
            if seat.is_movable and rest_until_s <= now_s:
                by_address[_address_of(seat)].append(seat)
        return by_address

    def _move(self, seat: MovableSeat, among: Sequence[Worker]) -> bool:
        """Order a move; False if there is no room for it, or there are too many."""
        if self._num_moving >= MAX_MOVES:
            return False
        here = _address_of(seat)
        reachable = [w for w in among if here not in self._fleet.barred_from(w.address)]
        placement = self._dispatcher.place_now(seat.passenger.spec_so_far(), reachable)
        if placement is None:
            return False
        self._num_moving += 1
        seat.order(placement, partial(self._ended, seat))
        return True

    def _ended(self, seat: MovableSeat) -> None:
        self._num_moving -= 1
        if seat in self._rest_until_s:
            self._rest_until_s[seat] = asyncio.get_running_loop().time() + REST_S
        self._has_ended.set()
        self._wake.set()


def _address_of(seat: MovableSeat) -> str:
    decode = seat.placement.decode
    return decode.address if decode else ""


def _memory_of(worker: Worker) -> Memory:
    view = worker.decode_view(0)
    return Memory(
        worker.address,
        view.block_size,
        view.num_blocks,
        view.num_available_blocks,
        view.max_num_seqs - view.num_sequences,
    )
