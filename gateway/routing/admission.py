"""Admission queue and wait estimates. The queue is bounded, fair between accounts, and ordered by
rank within an account. Pure.

Fairness follows the Virtual Token Counter of "Fairness in Serving Large Language Models" (OSDI
2024), counted in places instead of tokens: the account with the fewest places for its weight is
served next, and an idle account saves up no credit. An account with five hundred requests delays
another account by one place, not by five hundred. Priorities order the requests of one account
only.

With a target of the first token, requests that can still meet it precede those that cannot, which
get one place of LATE_EVERY: under overload first come, first served would make every request late.
A request that would wait too long behind those on time is late from its arrival on: so the others
stay on time, though the one that is due first goes first. If the wait turns out shorter, those of
them that can still be on time go first, with most time left, so new and short ones. Classes of
requests have targets of their own, and an account's request that is due sooner goes first.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from statistics import fmean
from typing import Generic, Protocol, TypeVar

from baton.errors import Overloaded
from baton.types import Rank, across_accounts
from gateway.routing.rivals import Share, Shares
from gateway.routing.ways import LATE_EVERY

#: Longer of the two estimates of a wait over the shorter one, up to which a refusal says it.
_MAX_DISAGREEMENT = 1.5

#: Estimates average this many latest samples of each kind.
_NUM_LATEST = 64

#: Minimum and maximum Retry-After, and its value before the first sample, in seconds.
_MIN_RETRY_S, _MAX_RETRY_S, _UNKNOWN_RETRY_S = 0.1, 600.0, 1.0

#: Entries of removed items that an account's heap may have, beside as many as it has places.
_NUM_REMOVED = 64

#: Units by which an account may be ahead of one that waits at another gateway, at least; else twice
#: what others were given between the last two notes.
_MIN_LEAD = 2.0

#: Counters kept for accounts with no waiting request.
_NUM_KEPT = 1024


class Queued(Protocol):
    """An item of the queue.
    width: places that it takes.
    is_return: it was placed before, and is served ahead of first admissions.
    ttft_s: its target of the first token; infinite without.
    late_s: time from which its first token misses it; -infinite if it was late on arrival.
    until_s: the same, as if nobody else waited; -infinite for one that is to wait for its turn."""

    @property
    def rank(self) -> Rank: ...
    @property
    def account(self) -> bytes: ...
    @property
    def width(self) -> int: ...
    @property
    def is_return(self) -> bool: ...
    @property
    def ttft_s(self) -> float: ...
    @property
    def late_s(self) -> float: ...
    @property
    def until_s(self) -> float: ...


QueuedT = TypeVar("QueuedT", bound=Queued)


class AdmissionQueue(Generic[QueuedT]):
    """Bounded fair queue. Ranks must be unique."""

    def __init__(self, max_size: int, weights: Mapping[bytes, float] | None = None) -> None:
        """max_size: bound on first admissions; returns are always accepted.
        weights: by account, above 0; 1 if absent. An account of weight 3 gets three times the
        places of an account of weight 1 while both wait."""
        self.max_size = max_size
        self._weights = weights or {}
        self._heaps: dict[bytes, list[Rank]] = {}
        """Of each account, those that were not late when they were last looked at."""
        self._late: dict[bytes, list[Rank]] = {}
        self._late_in_time: dict[bytes, list[tuple[int, float, float, Rank]]] = {}
        """Those of them that could be on time when they came, and entries of others: in the order
        of priority, the tightest targets, most time left: (priority, ttft_s, -until_s, rank)."""
        self._late_widths: Counter[bytes] = Counter()
        """Waiting places of these, by account."""
        self._late_ranks: set[Rank] = set()
        self._on_time_widths: dict[bytes, Counter[float]] = {}
        """Waiting places of all others, by account and target."""
        self._num_on_time = 0
        """Places given to others since the last late item."""
        self._now_s = -math.inf
        self._returns: list[tuple[Rank, Rank]] = []
        """(sort key, rank) of each return, of all accounts."""
        self._items: dict[Rank, QueuedT] = {}
        self._widths: Counter[bytes] = Counter()
        """Waiting places, by account."""
        self._counters: dict[bytes, float] = {}
        """Places given to each account per unit of its weight, counted from a common start."""
        self._floor = 0.0
        """Counter of the account served last, before it was charged."""
        self._given: dict[bytes, float] = defaultdict(float)
        """Units of weight given to each account by this queue."""
        self._waiting_elsewhere: Mapping[bytes, float] = {}
        """Counters of the accounts that wait in other gateways' queues; see rivals.py."""
        self._lead = _MIN_LEAD
        self.has_held = False
        """Whether an account was held up for one that waits elsewhere. Cleared by the caller."""
        self.ignores_rivals = False
        """Set for a place that nobody took; cleared once it is charged."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[QueuedT]:
        return iter(self._items.values())

    @property
    def width(self) -> int:
        """Places that all queued items take together."""
        return sum(item.width for item in self._items.values())

    def add(self, item: QueuedT) -> None:
        """Add an item, or put back one that was popped."""
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
        if item.late_s <= self._now_s:
            self._add_late(item)
            return
        heapq.heappush(self._heaps.setdefault(account, []), item.rank)
        self._on_time_widths.setdefault(account, Counter())[item.ttft_s] += item.width

    def pop(self, now_s: float, but_of: Collection[bytes] = ()) -> QueuedT | None:
        """Remove and return the item to serve next, or None. The caller calls `charge` once it is
        served. but_of: accounts to pass over."""
        self._now_s = now_s
        while self._returns:
            _, returned = heapq.heappop(self._returns)
            if (item := self._items.pop(returned, None)) is not None:
                return item
        is_turn_of_late = self._num_on_time >= LATE_EVERY - 1
        if is_turn_of_late:
            self._put_late_apart()
        return (
            (self._pop_of(self._late, but_of) if is_turn_of_late else None)
            or self._pop_of(self._heaps, but_of)
            or self._pop_in_time(but_of)
            or self._pop_of(self._late, but_of)
        )

    def _pop_in_time(self, but_of: Collection[bytes]) -> QueuedT | None:
        """Remove and return the late item with most time left, if any, of the account to serve
        next, or None."""
        heads = [
            (self._counters[account], across_accounts(rank), rank)
            for account, entries in self._late_in_time.items()
            if account not in but_of
            and (rank := self._first_in_time(entries)) is not None
            and not self.is_held(account)
        ]
        return self._take(min(heads)[2]) if heads else None

    def _first_in_time(self, entries: list[tuple[int, float, float, Rank]]) -> Rank | None:
        """Drops the entries of items that were removed or have no time left."""
        while entries:
            *_, negative_s, rank = entries[0]
            if rank in self._items and -negative_s > self._now_s:
                return rank
            heapq.heappop(entries)
        return None

    def _pop_of(self, heaps: dict[bytes, list[Rank]], but_of: Collection[bytes]) -> QueuedT | None:
        """Remove and return the first of these of the account to serve next, or None."""
        while heads := self._heads_of(heaps, but_of):
            _, _, account = min(heads)
            rank = heapq.heappop(heaps[account])
            if heaps is self._late or self._items[rank].late_s > self._now_s:
                return self._take(rank)
            self._make_late(rank)
        return None

    def _make_late(self, rank: Rank) -> None:
        """Move an item that was taken from `_heaps`."""
        item = self._items[rank]
        self._on_time_widths[item.account][item.ttft_s] -= item.width
        self._add_late(item)

    def _add_late(self, item: QueuedT) -> None:
        """Queue an item among the late ones."""
        self._late_ranks.add(item.rank)
        self._late_widths[item.account] += item.width
        heapq.heappush(self._late.setdefault(item.account, []), item.rank)
        if item.until_s > self._now_s:
            entries = self._late_in_time.setdefault(item.account, [])
            heapq.heappush(entries, (item.rank[0], item.ttft_s, -item.until_s, item.rank))
            # What was taken by its rank, or put back, leaves an entry.
            if len(entries) > self._max_entries(item.account):
                entries[:] = sorted({entry for entry in entries if entry[-1] in self._items})

    def _heads_of(
        self, heaps: dict[bytes, list[Rank]], but_of: Collection[bytes]
    ) -> list[tuple[float, Rank, bytes]]:
        """(counter, sort key, account) of the first item of each account."""
        return [
            (self._counters[account], across_accounts(rank), account)
            for account, heap in heaps.items()
            if account not in but_of
            and (rank := self._first_of(heap)) is not None
            and not self.is_held(account)
        ]

    def _put_late_apart(self) -> None:
        """Move the items that are late now, as far as they come first in their account."""
        for heap in self._heaps.values():
            while (rank := self._first_of(heap)) is not None:
                if self._items[rank].late_s > self._now_s:
                    break
                self._make_late(heapq.heappop(heap))

    def charge(self, item: QueuedT) -> None:
        """Charge the account of a popped item for the places it was given."""
        self.ignores_rivals = False
        if not item.is_return:
            is_late = max(item.late_s, item.until_s) <= self._now_s
            self._num_on_time = 0 if is_late else self._num_on_time + item.width
            counter = self._counters.get(item.account, self._floor)
            self._floor = max(self._floor, counter)
            units = item.width / self._weight(item.account)
            self._counters[item.account] = counter + units
            self._given[item.account] += units

    def shares(self) -> Shares:
        """What other gateways need to know of this queue."""
        accounts = {
            account: Share(self._given.get(account, 0.0), counter, account in self._widths)
            for account, counter in self._counters.items()
        }
        return Shares(self._floor, accounts)

    def share(
        self, floor: float, charges: Mapping[bytes, float], waiting: Mapping[bytes, float]
    ) -> None:
        """Count what other gateways do. floor: their highest. charges: units that they gave to each
        account. waiting: counters of the accounts that wait there."""
        for account, units in charges.items():
            if account in self._counters:
                self._counters[account] += units
        for account, counter in waiting.items():
            self._counters[account] = max(self._counters.get(account, 0.0), counter)
        self._floor = max(self._floor, floor)
        self._waiting_elsewhere = waiting
        self._lead = max(_MIN_LEAD, 2.0 * max(charges.values(), default=0.0))
        self._forget_idle()

    @property
    def has_rivals(self) -> bool:
        """Whether accounts wait at other gateways, so that places are charged without a queue."""
        return bool(self._waiting_elsewhere)

    def is_held(self, account: bytes) -> bool:
        """Whether another account that waits elsewhere comes first, by more than it may have been
        given since this queue heard of it."""
        if not self._waiting_elsewhere or self.ignores_rivals:
            return False
        counters = (c for other, c in self._waiting_elsewhere.items() if other != account)
        least = min(counters, default=math.inf)
        is_held = self._counters.get(account, self._floor) > least + self._lead
        self.has_held |= is_held
        return is_held

    def remove(self, item: QueuedT) -> None:
        """Remove an item at any position; no-op if it is not queued."""
        if item.rank not in self._items:
            return
        self._take(item.rank)
        # Entries of removed items would wait for all better ones: for ever, if these keep coming.
        for heaps in (self._heaps, self._late):
            if len(heap := heaps.get(item.account, [])) > self._max_entries(item.account):
                heap[:] = filter(self._items.__contains__, heap)
                heapq.heapify(heap)

    def width_before(self, account: bytes, width: int, ttft_s: float = math.inf) -> float:
        """Places given before an item of this width and target, queued last and on time, is
        served."""
        returns = sum(self._items[rank].width for _, rank in self._returns if rank in self._items)
        late = self._late_widths
        on_time = {other: w - late[other] for other, w in self._widths.items()}
        # Of its own account, looser targets are due later.
        of_own = self._on_time_widths.get(account, Counter[float]())
        on_time[account] = sum(w for target_s, w in of_own.items() if target_s <= ttft_s)
        before = returns + self._given_before(on_time, account, width)
        return before + min(late.total(), before / (LATE_EVERY - 1))

    def width_before_late(self, account: bytes, width: int) -> float:
        """The same of an item that is late on arrival, while others keep coming in time."""
        before = self._given_before(self._late_widths, account, width)
        return LATE_EVERY * (before + width) - width

    def _given_before(self, widths: Mapping[bytes, int], account: bytes, width: int) -> float:
        """Places given to all accounts before one has got those that it waits for, and `width`
        more. widths: waiting places, by account."""
        own = widths.get(account, 0)
        # Meanwhile each other account gets as many places per unit of weight as this one, or all
        # that it waits for.
        per_unit = (own + width) / self._weight(account)
        return own + sum(
            min(w, per_unit * self._weight(other))
            for other, w in widths.items()
            if other != account
        )

    def _max_entries(self, account: bytes) -> int:
        return 2 * self._widths[account] + _NUM_REMOVED

    def _weight(self, account: bytes) -> float:
        return self._weights.get(account, 1.0)

    def _first_of(self, heap: list[Rank]) -> Rank | None:
        """Rank of the first item that was not removed."""
        while heap and heap[0] not in self._items:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _take(self, rank: Rank) -> QueuedT:
        item = self._items.pop(rank)
        if not item.is_return:
            if rank in self._late_ranks:
                self._late_ranks.remove(rank)
                self._late_widths[item.account] -= item.width
            else:
                self._on_time_widths[item.account][item.ttft_s] -= item.width
            self._widths[item.account] -= item.width
            if not self._widths[item.account]:
                del self._late_widths[item.account]
                del self._widths[item.account]
                self._heaps.pop(item.account, None)
                self._on_time_widths.pop(item.account, None)
                self._late.pop(item.account, None)
                self._late_in_time.pop(item.account, None)
        return item

    def _forget_idle(self) -> None:
        if len(self._counters) > _NUM_KEPT + len(self._widths):
            self._counters = {
                account: counter
                for account, counter in self._counters.items()
                if counter > self._floor or account in self._widths
            }
            for account in self._given.keys() - self._counters.keys():
                del self._given[account]


class Expiring(Protocol):
    """An item that stops waiting at some time. is_over: whether it has."""

    @property
    def is_over(self) -> bool: ...


ExpiringT = TypeVar("ExpiringT", bound=Expiring)


class LastStarts(Generic[ExpiringT]):
    """Waiting items by the last time at which they can start and still end by their deadline."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, ExpiringT]] = []
        """(last start, number, item)."""
        self._num_added = 0

    def add(self, start_s: float, item: ExpiringT) -> None:
        if start_s < math.inf:
            self._num_added += 1
            heapq.heappush(self._entries, (start_s, self._num_added, item))

    def due(self, now_s: float) -> list[ExpiringT]:
        """Remove and return the waiting items that should have started."""
        due = []
        while self._entries and self._entries[0][0] <= now_s:
            due.append(heapq.heappop(self._entries)[-1])
        return [item for item in due if not item.is_over]

    def next_s(self, num_waiting: int) -> float:
        """Time of the next one; infinite if there is none. num_waiting: bounds what is kept of
        others."""
        entries = self._entries
        if len(entries) > 2 * num_waiting + _NUM_REMOVED:
            entries[:] = sorted(entry for entry in entries if not entry[-1].is_over)
        while entries and entries[0][-1].is_over:
            heapq.heappop(entries)
        return entries[0][0] if entries else math.inf


class _Latest:
    """The mean of the latest values; 0 before the first one."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_NUM_LATEST)
        self.mean = 0.0

    def append(self, value: float) -> None:
        self._values.append(value)
        self.mean = fmean(self._values)


class WaitEstimate:
    """Estimates waiting and running times from recent samples. All times are seconds on one
    clock."""

    def __init__(self) -> None:
        self._served: deque[tuple[float, int]] = deque(maxlen=_NUM_LATEST)
        """(time, places) of each placement from the queue, on `_waited_s`."""
        self._num_served = 0
        """Places of all of these."""
        self._waited_s = 0.0
        """Seconds during which something waited: a clock that stops while the queue is empty."""
        self._since_s: float | None = None
        """Start of the current waiting period; None while the queue is empty."""
        self._holds_s, self._lengths = _Latest(), _Latest()
        """Seconds from placement to end of ended outputs, and their tokens."""
        self._running: deque[int] = deque(maxlen=_NUM_LATEST)
        """Outputs that held a place, at each estimate. Outputs of one length end together: the
        most of them is the number of places, the latest may be next to none."""

    def set_waiting(self, is_waiting: bool, now_s: float) -> None:
        """Update the waiting clock. Call it whenever the queue may have become empty or
        non-empty."""
        if self._since_s is not None:
            self._waited_s += now_s - self._since_s
        elif is_waiting and not self._served:
            self._append_served(0)
        self._since_s = now_s if is_waiting else None

    def on_served(self, width: int, now_s: float) -> None:
        """Record that a waiting item was given `width` places."""
        self.set_waiting(self._since_s is not None, now_s)
        self._append_served(width)

    def _append_served(self, width: int) -> None:
        if len(self._served) == _NUM_LATEST:
            self._num_served -= self._served[0][1]
        self._served.append((self._waited_s, width))
        self._num_served += width

    def on_ended(self, hold_s: float, num_tokens: int) -> None:
        """Record that an output of `num_tokens` tokens ended `hold_s` after its placement."""
        self._holds_s.append(hold_s)
        self._lengths.append(max(1, num_tokens))

    def seconds_for(self, num_places: float, num_running: int, now_s: float) -> float | None:
        """Estimated seconds until `num_places` places have been given; None before the first
        sample.

        The longer of two estimates is returned: the rate at which places were given, which is
        optimistic while the queue is short, and the rate at which running outputs will end.
        num_running: outputs that hold a place now.
        """
        self._running.append(num_running)
        of_each_s = self._seconds_for_one(now_s)
        return num_places * max(of_each_s) if of_each_s else None

    def is_agreed(self, now_s: float) -> bool:
        """Whether both estimates exist, and are so close that the longer one can be told."""
        of_each_s = self._seconds_for_one(now_s)
        return len(of_each_s) == 2 and max(of_each_s) <= _MAX_DISAGREEMENT * min(of_each_s)

    def _seconds_for_one(self, now_s: float) -> list[float]:
        """The estimates that there are samples for, of one place."""
        self.set_waiting(self._since_s is not None, now_s)
        estimates_s = []
        # Those of the first one were given before the time that is counted.
        num_served = self._num_served - self._served[0][1] if self._served else 0
        if num_served:
            estimates_s.append((self._waited_s - self._served[0][0]) / num_served)
        if self._lengths.mean and (num_running := max(self._running, default=0)):
            estimates_s.append(self._holds_s.mean / num_running)
        return estimates_s

    def hold_s(self, max_tokens: int) -> float:
        """Estimated seconds from placement to end of an output of at most `max_tokens` tokens; 0
        before the first sample."""
        if not self._lengths.mean:
            return 0.0
        return self._holds_s.mean * min(1.0, max_tokens / self._lengths.mean)


def queue_full(num_waiting: int, max_size: int, clear_s: float | None) -> Overloaded:
    """The error for a full queue. clear_s: estimated seconds to serve all waiting requests."""
    return Overloaded(
        f"{num_waiting} requests wait already, as many as --max-queue-size allows",
        retry_after_s=retry_s(clear_s),
        max_queue_size=str(max_size),
    )


def too_late(
    expected_s: float, left_s: float, *, is_told: bool, on_time_in_s: float = math.inf
) -> Overloaded:
    """The error for a request expected to end in `expected_s` seconds, with `left_s` seconds to its
    deadline. is_told: whether the estimate is good enough to be told. on_time_in_s: when one like
    it would be on time."""
    when = f"in {expected_s:.1f} s, and its deadline" if is_told else "after its deadline, which"
    return Overloaded(
        f"the answer is expected {when} is in {left_s:.1f} s; allow more time, or try again later",
        retry_after_s=retry_s(min(expected_s - left_s, on_time_in_s)),
    )


def retry_s(seconds: float | None) -> float:
    """Retry-After for an estimate in seconds, within limits."""
    if seconds is None:
        return _UNKNOWN_RETRY_S
    return min(_MAX_RETRY_S, max(_MIN_RETRY_S, seconds))
