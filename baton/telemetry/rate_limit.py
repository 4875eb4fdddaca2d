"""Rate limit for log messages that may occur with every request."""

from __future__ import annotations

from collections.abc import Callable


class RateLimit:
    """Passes one message per interval and counts the suppressed ones."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._last_s: float | None = None
        self._num_held = 0

    def take(self) -> int | None:
        """Return the number of messages since the last one passed, including this one; None if this
        one is suppressed."""
        self._num_held += 1
        now_s = self._clock()
        if self._last_s is not None and now_s - self._last_s < self._interval_s:
            return None
        self._last_s = now_s
        num_held, self._num_held = self._num_held, 0
        return num_held
