"""The queue of sequences that wait for a place: bounded, fair between accounts, by rank within one;
and how long one waits. Pure.

Accounts are served by counters, as the Virtual Token Counter of "Fairness in Serving Large Language
Models" (OSDI 2024) serves clients, but counted in places: who was given fewest for its weight is
next, and who comes back after a while has saved up nothing. So one with five hundred requests makes
another wait for one place, not for five hundred; and priorities order an account's own requests.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping
from statistics import fmean
from typing import Generic, Protocol, TypeVar

from baton.errors import Overloaded
from baton.types import Rank, across_accounts

#: What estimates are made of: the latest of each kind.
_NUM_LATEST = 64

#: Limits of the advice when to try again, in seconds; and the advice while nothing is known.
_MIN_RETRY_S, _MAX_RETRY_S, _UNKNOWN_RETRY_S = 0.1, 600.0, 1.0

#: Accounts whose counters are kept though nothing of theirs waits.
_NUM_KEPT = 1024


class Queued(Protocol):
    """What waits. width: places that it takes. is_return: it was placed before, and goes first."""

    @property
    def rank(self) -> Rank: ...
    @property
    def account(self) -> bytes: ...
    @property
    def width(self) -> int: ...
    @property
    def is_return(self) -> bool: ...


QueuedT = TypeVar("QueuedT", bound=Queued)


class AdmissionQueue(Generic[QueuedT]):
    """Ranks are unique."""

    def __init__(self, max_size: int, weights: Mapping[bytes, float] | None = None) -> None:
        """`max_size` bounds first admissions; what comes back to be placed anew always finds
        room. weights: of accounts, above 0; of all others 1. Of two that wait all the time, one of
        weight 3 is given three times the places of one of weight 1."""
        self.max_size = max_size
        self._weights = weights or {}
        self._heaps: dict[bytes, list[Rank]] = {}
        self._returns: list[tuple[Rank, Rank]] = []
        """Ranks of all accounts' returns, each behind that by which it is sorted."""
        self._items: dict[Rank, QueuedT] = {}
        self._widths: Counter[bytes] = Counter()
        """Places that each account waits for."""
        self._counters: dict[bytes, float] = {}
        """Places that each account was given, from a common beginning on, for each unit of its
        weight."""
        self._floor = 0.0
        """The counter of the account that was served last, before that."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def width(self) -> int:
        """Places that all together wait for."""
        return sum(item.width for item in self._items.values())

    def add(self, item: QueuedT) -> None:
        """Queue an item, or put one back that was popped."""
        if item.rank in self._items:
            raise ValueError(f"rank {item.rank} is queued already")
        self._items[item.rank] = item
        if item.is_return:
            heapq.heappush(self._returns, (across_accounts(item.rank), item.rank))
            return
        account = item.account
        if not self._widths[account]:
            self._counters[account] = max(self._counters.get(account, 0), self._floor)
            self._forget_idle()
        self._widths[account] += item.width
        heapq.heappush(self._heaps.setdefault(account, []), item.rank)

    def pop(self) -> QueuedT | None:
        """Take out the item to be served next, if there is one; `charge` it once it is served."""
        while self._returns:
            _, returned = heapq.heappop(self._returns)
            if (item := self._items.pop(returned, None)) is not None:
                return item
        heads = [
            (self._counters[account], across_accounts(rank), account)
            for account, heap in self._heaps.items()
            if (rank := self._first_of(heap)) is not None
        ]
        if not heads:
            return None
        _, _, account = min(heads)
        return self._take(heapq.heappop(self._heaps[account]))

    def charge(self, item: QueuedT) -> None:
        """An item that was popped has been given its places."""
        if not item.is_return:
            counter = self._counters.get(item.account, self._floor)
            self._floor = max(self._floor, counter)
            self._counters[item.account] = counter + item.width / self._weight(item.account)

    def remove(self, item: QueuedT) -> None:
        """Take an item out, wherever it stands; nothing happens if it is not there."""
        if item.rank in self._items:
            self._take(item.rank)

    def width_before(self, account: bytes, width: int) -> float:
        """Places that are given before an item of this width would be served, if it came last."""
        returns = sum(self._items[rank].width for _, rank in self._returns if rank in self._items)
        own = self._widths[account]
        # For each unit of its weight, each other account gets as many meanwhile as this one, or
        # what it waits for.
        per_unit = (own + width) / self._weight(account)
        others = (
            min(w, per_unit * self._weight(other))
            for other, w in self._widths.items()
            if other != account
        )
        return returns + own + sum(others)

    def _weight(self, account: bytes) -> float:
        return self._weights.get(account, 1.0)

    def _first_of(self, heap: list[Rank]) -> Rank | None:
        """The first that has not been removed."""
        while heap and heap[0] not in self._items:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _take(self, rank: Rank) -> QueuedT:
        item = self._items.pop(rank)
        if not item.is_return:
            self._widths[item.account] -= item.width
            if not self._widths[item.account]:
                del self._widths[item.account]
                self._heaps.pop(item.account, None)
        return item

    def _forget_idle(self) -> None:
        if len(self._counters) > _NUM_KEPT + len(self._widths):
            self._counters = {
                account: counter
                for account, counter in self._counters.items()
                if counter > self._floor or account in self._widths
            }


class WaitEstimate:
    """How fast the queue has been served lately, and how long what it served took. Times in seconds
    on one clock."""

    def __init__(self) -> None:
        self._served: deque[tuple[float, int]] = deque(maxlen=_NUM_LATEST)
        """When places were given to what had waited, on a clock that stands still while nothing
        waits; and how many."""
        self._waited_s = 0.0
        """That clock."""
        self._since_s: float | None = None
        """Since when something waits, if it does."""
        self._holds: deque[tuple[float, int]] = deque(maxlen=_NUM_LATEST)
        """How long outputs took from their places on, and their numbers of tokens."""

    def set_waiting(self, is_waiting: bool, now_s: float) -> None:
        """Whether something waits, whenever that may have changed."""
        if self._since_s is not None:
            self._waited_s += now_s - self._since_s
        elif is_waiting and not self._served:
            self._served.append((self._waited_s, 0))
        self._since_s = now_s if is_waiting else None

    def on_served(self, width: int, now_s: float) -> None:
        """Something that waited was given its places."""
        self.set_waiting(self._since_s is not None, now_s)
        self._served.append((self._waited_s, width))

    def on_ended(self, hold_s: float, num_tokens: int) -> None:
        """An output of so many tokens has ended, so long after it was given a place."""
        self._holds.append((hold_s, max(1, num_tokens)))

    def seconds_for(self, num_places: float, num_running: int, now_s: float) -> float | None:
        """How long it takes until so many places have been given; None while nothing is known.

        num_running: outputs that hold a place. The longer of two estimates: by how fast places were
        given, which is too good while the queue is short, for then who waits is served soon; and by
        how fast those that run will end.
        """
        self.set_waiting(self._since_s is not None, now_s)
        estimates_s = []
        num_served = sum([width for _, width in self._served][1:])
        if num_served:
            estimates_s.append((self._waited_s - self._served[0][0]) / num_served)
        if self._holds and num_running:
            estimates_s.append(self._mean_hold_s / num_running)
        return num_places * max(estimates_s) if estimates_s else None

    def hold_s(self, max_tokens: int) -> float:
        """How long an output of at most so many tokens takes from its place on; 0 while nothing is
        known."""
        if not self._holds:
            return 0.0
        mean_tokens = fmean(num_tokens for _, num_tokens in self._holds)
        return self._mean_hold_s * min(1.0, max_tokens / mean_tokens)

    @property
    def _mean_hold_s(self) -> float:
        return fmean(hold_s for hold_s, _ in self._holds)


def queue_full(num_waiting: int, max_size: int, clear_s: float | None) -> Overloaded:
    """clear_s: how long it takes to serve all that wait."""
    return Overloaded(
        f"{num_waiting} requests wait already, as many as --max-queue-size allows",
        retry_after_s=retry_s(clear_s),
        max_queue_size=str(max_size),
    )


def too_late(expected_s: float, left_s: float) -> Overloaded:
    """Of a request that is expected to end so many seconds from now, and has fewer left."""
    return Overloaded(
        f"the answer is expected in {expected_s:.1f} s, and its deadline is in {left_s:.1f} s; "
        "allow more time, or try again later",
        retry_after_s=retry_s(expected_s - left_s),
    )


def retry_s(seconds: float | None) -> float:
    """Advice when to try again."""
    if seconds is None:
        return _UNKNOWN_RETRY_S
    return min(_MAX_RETRY_S, max(_MIN_RETRY_S, seconds))
