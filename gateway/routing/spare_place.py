"""Keeps one place of the decode tier for accounts that come and go. Pure.

The queue serves an account without running sequences next, but not before a place is free: where
another account has all of them, after one of its answers has ended. So the last free place is left
to accounts that have none, as long as one such account is expected: it sent a request lately, and
has none running now. Without one, all places are given away.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

#: Seconds after its latest request for which an account is expected again.
EXPECTED_S = 60.0

#: Places from which on one is kept: of fewer, it would be too large a part.
MIN_PLACES = 8

#: Maximum accounts that are remembered.
_MAX_ACCOUNTS = 64


class SparePlace:
    """Who has places, and who may come back. All times are seconds on one clock."""

    def __init__(self) -> None:
        self._num_running: Counter[bytes] = Counter()
        """Placements by account, if any."""
        self._last_s: OrderedDict[bytes, float] = OrderedDict()
        """Latest request of each account, the latest last."""

    def on_request(self, account: bytes, now_s: float) -> None:
        """Record a request, before it is placed."""
        self._last_s[account] = now_s
        self._last_s.move_to_end(account)
        if len(self._last_s) > _MAX_ACCOUNTS:
            self._last_s.popitem(last=False)

    def on_placed(self, account: bytes) -> None:
        self._num_running[account] += 1

    def on_released(self, account: bytes) -> None:
        self._num_running[account] -= 1
        if not self._num_running[account]:
            del self._num_running[account]

    def is_kept_from(self, account: bytes, now_s: float) -> bool:
        """Whether an account must leave the last free place to another."""
        return self._num_running[account] > 0 and self.is_kept(now_s)

    def is_kept(self, now_s: float) -> bool:
        """Whether an account without places is expected."""
        return any(
            now_s - last_s < EXPECTED_S and not self._num_running[account]
            for account, last_s in self._last_s.items()
        )
