"""Pairs of workers whose KV does not get through: remembered for a while, so that not every sequence finds it out. Pure."""

from __future__ import annotations

from collections.abc import Set

#: How long a pair is not tried again, in seconds.
REST_S = 30.0
#: Pairs remembered; the oldest are forgotten before their time.
MAX_PAIRS = 512


class BrokenPairs:
    """Prefill and decode workers by address. A worker that leaves takes its pairs with it: it may come back mended."""

    def __init__(self) -> None:
        self._until_s: dict[tuple[str, str], float] = {}
        """By prefill and decode worker, in the order of their ends."""
        self._prefills: dict[str, set[str]] = {}
        """The same, by decode worker."""

    def note(self, prefill: str, decode: str, now_s: float) -> bool:
        """KV of `prefill` could not be delivered to `decode`. Whether that is news."""
        pair = (prefill, decode)
        is_news = pair not in self._until_s
        self._drop(pair)
        self._until_s[pair] = now_s + REST_S
        self._prefills.setdefault(decode, set()).add(prefill)
        if len(self._until_s) > MAX_PAIRS:
            self._drop(next(iter(self._until_s)))
        return is_news

    def with_decode(self, decode: str) -> Set[str]:
        """The prefill workers that are not to be tried with `decode`."""
        return self._prefills.get(decode, frozenset())

    def expire(self, now_s: float) -> None:
        """Forget those whose time is over."""
        for pair, until_s in tuple(self._until_s.items()):
            if now_s < until_s:
                return
            self._drop(pair)

    def drop(self, worker: str) -> None:
        """Forget all pairs of a worker of either tier."""
        for pair in [pair for pair in self._until_s if worker in pair]:
            self._drop(pair)

    def _drop(self, pair: tuple[str, str]) -> None:
        if self._until_s.pop(pair, None) is None:
            return
        prefill, decode = pair
        self._prefills[decode].remove(prefill)
        if not self._prefills[decode]:
            del self._prefills[decode]
