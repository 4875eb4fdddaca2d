"""How many workers a fleet should have. Pure but for the number that was said last.

More are said at once. Fewer are said slowly: a worker that goes loses its cache, and another one
takes a while to start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

#: Loss of score for which no further worker is taken.
MARGIN = 0.02
#: Seconds for which fewer workers have to be enough before fewer are said; or so many times what a
#: worker has taken to start, if that is longer.
SPARE_S, _STARTS = 60.0, 5.0
#: One of so many workers goes at a time, at least one.
_GOES_ONE_OF = 16


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least and greatest number of workers."""

    least: int
    most: int

    def clip(self, number: int) -> int:
        return min(max(number, self.least), self.most)


def num_going(num_workers: int) -> int:
    """Workers that go at a time, of so many."""
    return max(1, num_workers // _GOES_ONE_OF)


def enough(score_of: Callable[[int], float], present: int, bounds: Bounds) -> int:
    """The least number of workers that scores as the greatest number does, less MARGIN; as few
    replays as find it. Of smaller numbers than `present` only the next one is looked at.

    score_of: of a number of workers; grows with it.
    """
    present = bounds.clip(present)
    needed = score_of(bounds.most) - MARGIN
    fewer = bounds.clip(present - num_going(present))
    if fewer < present and score_of(fewer) >= needed:
        return fewer
    low, high = present, bounds.most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if score_of(middle) >= needed else (middle + 1, high)
    return low


class Size:
    """The number that is said for one model's workers."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.said: int | None = None
        """None: nothing; then the workers stay that are there."""
        self._spare_since_s = inf
        """Since when fewer have been enough."""
        self._grown_s = inf
        """When more were said that have not all come yet."""
        self._start_s = 0.0
        """Seconds that workers took to come after they had been asked for."""

    def lead(self, said: int | None) -> None:
        """Begin a term. said: by the leader before; None if it said nothing."""
        self.said = said
        self.pause()

    def pause(self) -> None:
        """Another leads meanwhile: the time until the next decision says nothing."""
        self._spare_since_s = self._grown_s = inf

    def on_workers(self, now_s: float, num_ready: int) -> None:
        """Learn how long workers take to start."""
        if self.said is not None and num_ready >= self.said and self._grown_s < inf:
            self._start_s, self._grown_s = now_s - self._grown_s, inf

    def num_spare(self, now_s: float, num_ready: int, num_needed: int) -> int:
        """Say more workers if more are needed. Return how many have long been spare, of which the
        caller may let go by `shrink`."""
        current = num_ready if self.said is None else self.said
        if num_needed >= current:
            self._spare_since_s = inf
            if num_needed > current:
                self.said = num_needed
                self._grown_s = min(self._grown_s, now_s)
            return 0
        self._spare_since_s = min(self._spare_since_s, now_s)
        is_long = now_s - self._spare_since_s >= max(SPARE_S, _STARTS * self._start_s)
        return min(current - num_needed, num_going(current)) if is_long else 0

    def num_leaving(self, num_ready: int, num_spare: int = 0) -> int:
        """Ready workers that go once so many fewer are said."""
        return max(0, num_ready - (num_ready if self.said is None else self.said) + num_spare)

    def shrink(self, num_ready: int, num_spare: int) -> None:
        """Say so many fewer."""
        self.said = (num_ready if self.said is None else self.said) - num_spare
        self._spare_since_s = inf
