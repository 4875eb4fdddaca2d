"""The queue of sequences that wait for a place: bounded, by rank. Pure."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

from baton.errors import Overloaded
from baton.types import Rank

ItemT = TypeVar("ItemT")

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 30.0


class AdmissionQueue(Generic[ItemT]):
    """Items in order of rank, lowest first. Ranks are unique."""

    def __init__(self, max_size: int) -> None:
        """`max_size` bounds first admissions; what comes back to be placed anew always finds
        room."""
        self._max_size = max_size
        self._heap: list[Rank] = []
        self._items: dict[Rank, ItemT] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, rank: Rank, item: ItemT, *, is_return: bool, seconds_per_item: float) -> None:
        """Queue an item. `seconds_per_item`: how long the queue lately took to shrink by one, for
        the advice to wait.

        Raises Overloaded if the queue is full and the item is new.
        """
        if not is_return and len(self._items) >= self._max_size:
            wait_s = min(_MAX_RETRY_S, max(_MIN_RETRY_S, seconds_per_item * len(self._items)))
            raise Overloaded(
                f"{len(self._items)} requests wait already, as many as --max-queue-size allows",
                retry_after_s=wait_s,
                max_queue_size=str(self._max_size),
            )
        self.restore(rank, item)

    def restore(self, rank: Rank, item: ItemT) -> None:
        """Put an item back that was popped."""
        if rank in self._items:
            raise ValueError(f"rank {rank} is queued already")
        self._items[rank] = item
        heapq.heappush(self._heap, rank)

    def pop(self) -> ItemT | None:
        """Take out the item to be served next, if there is one."""
        while self._heap:
            item = self._items.pop(heapq.heappop(self._heap), None)
            if item is not None:
                return item
        return None

    def remove(self, rank: Rank) -> None:
        """Take an item out, wherever it stands; nothing happens if it is not there."""
        if self._items.pop(rank, None) is not None:
            self._heap.remove(rank)
            heapq.heapify(self._heap)
