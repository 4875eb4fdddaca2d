"""Pairs of workers between which KV does not get through: remembered for a while, so that not every
sequence finds it out. Pure.

The first failure may be a flipped bit or a lost connection: the pair rests for a moment, in which
what failed goes another way. One that fails again soon after rests for long.
"""

from __future__ import annotations

import math
from collections.abc import Set

#: How long a pair is not tried again after its first failure, in seconds.
FIRST_REST_S = 2.0
#: How long after a further one; and how long after a rest a failure counts as a further one.
REST_S = 30.0
#: Pairs remembered; those that failed longest ago are forgotten before their time.
MAX_PAIRS = 512


class BrokenPairs:
    """Senders and receivers of KV by address. A worker that leaves takes its pairs with it: it may
    come back mended."""

    def __init__(self) -> None:
        self._until_s: dict[tuple[str, str], float] = {}
        """The ends of rests, over or not, by sender and receiver; those that failed longest ago
        first."""
        self._resting: dict[str, set[str]] = {}
        """The senders of the pairs that rest, by receiver."""
        self._next_end_s = math.inf
        """Nothing is to be forgotten before this."""

    def note(self, sender: str, receiver: str, now_s: float) -> float | None:
        """KV could not be delivered. For how long the pair rests from now on, in seconds; None: it
        does so already.

        What fails while a pair rests was begun before, and is no news.
        """
        self.expire(now_s)
        if sender in self.barred_from(receiver):
            return None
        pair = (sender, receiver)
        rest_s = REST_S if pair in self._until_s else FIRST_REST_S
        self._drop(pair)
        self._until_s[pair] = now_s + rest_s
        self._resting.setdefault(receiver, set()).add(sender)
        self._next_end_s = min(self._next_end_s, now_s + rest_s)
        if len(self._until_s) > MAX_PAIRS:
            self._drop(next(iter(self._until_s)))
        return rest_s

    def barred_from(self, receiver: str) -> Set[str]:
        """The senders that are not to be tried with `receiver`."""
        return self._resting.get(receiver, frozenset())

    def expire(self, now_s: float) -> None:
        """End the rests, and forget the pairs, whose time is over."""
        if now_s < self._next_end_s:
            return
        ends: list[float] = [math.inf]
        for pair, until_s in tuple(self._until_s.items()):
            if now_s >= until_s + REST_S:
                self._drop(pair)
            elif now_s >= until_s:
                self._wake(pair)
                ends.append(until_s + REST_S)
            else:
                ends.append(until_s)
        self._next_end_s = min(ends)

    def drop(self, worker: str) -> None:
        """Forget all pairs of a worker of either tier."""
        for pair in [pair for pair in self._until_s if worker in pair]:
            self._drop(pair)

    def _drop(self, pair: tuple[str, str]) -> None:
        self._until_s.pop(pair, None)
        self._wake(pair)

    def _wake(self, pair: tuple[str, str]) -> None:
        sender, receiver = pair
        resting = self._resting.get(receiver, set())
        resting.discard(sender)
        if not resting:
            self._resting.pop(receiver, None)
