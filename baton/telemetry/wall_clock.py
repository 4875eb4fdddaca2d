"""Moments of a monotonic clock as the wall-clock nanoseconds that spans have."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WallClock:
    """Converts moments, in seconds, of the clock it was made for. Within one of these, differences
    stay what they were, even if the wall clock is set meanwhile."""

    offset_ns: int

    @classmethod
    def of(cls, clock: Callable[[], float]) -> WallClock:
        """What `clock`'s moments are by the wall clock of now."""
        return cls(time.time_ns() - int(clock() * 1e9))

    def ns(self, moment_s: float) -> int:
        """The moment in nanoseconds since the epoch."""
        return self.offset_ns + int(moment_s * 1e9)
