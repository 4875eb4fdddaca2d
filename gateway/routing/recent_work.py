"""Who of a tier is ahead: tokens that each worker was given lately, beside the tier's mean. Pure.

Queues do not show it: between two arrivals they are empty, and the worker that did the last
thousand prompts looks like the one that did none. "Lately" is counted in work, not in time, so it
means the same at night and at noon.
"""

from __future__ import annotations

import math

#: What was given counts 1/e once the mean worker has been given this many tokens more.
MEMORY_TOKENS = 262_144


class RecentWork:
    """Sums over the workers that take work. One that joins begins at the mean: it is neither spared
    nor flooded."""

    def __init__(self, memory_tokens: int = MEMORY_TOKENS) -> None:
        self._memory_tokens = memory_tokens
        self._now_tokens = 0.0
        """What the mean worker was given since the beginning: the clock by which sums fade."""
        self._sums: dict[str, tuple[float, float]] = {}
        """By worker: a sum, and the clock when it was right."""
        self._total = 0.0
        """Of all sums, now."""

    def add(self, worker: str) -> None:
        """`worker` takes work from now on. It may be in already."""
        if worker not in self._sums:
            mean = self._mean()
            self._sums[worker] = (mean, self._now_tokens)
            self._total += mean

    def drop(self, worker: str) -> None:
        """`worker` takes no more work. It may be out already."""
        self._total = max(0.0, self._total - self._sum_of(worker))
        self._sums.pop(worker, None)

    def give(self, worker: str, num_tokens: int) -> None:
        """`worker` has been given a prompt of which it has to compute `num_tokens`. Nothing, if it
        takes no work."""
        if worker not in self._sums:
            return
        step = num_tokens / len(self._sums)
        self._now_tokens += step
        self._total = self._total * self._faded(step) + num_tokens
        self._sums[worker] = (self._sum_of(worker) + num_tokens, self._now_tokens)

    def ahead(self, worker: str) -> float:
        """Tokens above the mean; below, if negative; 0 for one that takes no work."""
        return self._sum_of(worker) - self._mean() if worker in self._sums else 0.0

    def _mean(self) -> float:
        return self._total / len(self._sums) if self._sums else 0.0

    def _sum_of(self, worker: str) -> float:
        value, since = self._sums.get(worker, (0.0, 0.0))
        return value * self._faded(self._now_tokens - since)

    def _faded(self, num_tokens: float) -> float:
        return math.exp(-num_tokens / self._memory_tokens)
