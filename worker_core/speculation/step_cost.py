"""How long a step takes with drafts, learned from the steps that were made.

For each number of rows (rounded), the time of steps without drafts, and how many times as long
those with drafts took: a ratio, so that growing contexts and other work on the machine, which slow
both down, do not look like a price of drafts. On a shared machine a step may take longer than it
should, by a lot and several times in a row, but never less: so a low quantile of the last few
timings counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque

#: Before it was measured, a draft's row is taken to cost this share of another row.
_UNKNOWN_ROW_SHARE = 0.5

#: Timings of one size that count, and how many of them are below the one that stands for all, as a
#: divisor.
_NUM_TIMINGS = 9
_QUANTILE = 4


def rounded(number: int, num_bits: int) -> int:
    """`number` with only its first `num_bits` binary digits kept."""
    shift = max(0, number.bit_length() - num_bits)
    return number >> shift << shift


class _Timings:
    """The last few of about the same size."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, int]] = deque(maxlen=_NUM_TIMINGS)
        self.value = 0.0
        self.size = 0.0

    @property
    def weight(self) -> int:
        return len(self._values)

    def add(self, value: float, size: int) -> None:
        self._values.append((value, size))
        self.value = sorted(self._values)[(self.weight - 1) // _QUANTILE][0]
        self.size = sum(size for _, size in self._values) / self.weight


class DraftCurve:
    """Seconds over the number of drafts, never falling, for steps of about the same number of other
    rows."""

    def __init__(self) -> None:
        self._plain = _Timings()
        self._drafted: defaultdict[int, _Timings] = defaultdict(_Timings)
        self._sizes = [0.0]
        self._ratios = [1.0]
        self.num_steps_since_plain = 0
        """Steps with drafts since the last one without."""

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """A step took so long. The first one observed has no drafts."""
        if num_drafts == 0:
            self.num_steps_since_plain = 0
            self._plain.add(seconds, num_rows)
            return
        self.num_steps_since_plain += 1
        self._drafted[rounded(num_drafts, 3)].add(seconds / self._plain.value, num_drafts)
        self._fit()

    def seconds(self, num_drafts: int) -> float:
        """Seconds of a step with so many drafts."""
        return self._plain.value * self._ratio(num_drafts)

    def _ratio(self, num_drafts: int) -> float:
        sizes, ratios = self._sizes, self._ratios
        place = bisect_left(sizes, num_drafts)
        if place == len(sizes):
            return ratios[-1] + (num_drafts - sizes[-1]) * self._slope_beyond()
        if place == 0:
            return ratios[0]
        share = (num_drafts - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return ratios[place - 1] + share * (ratios[place] - ratios[place - 1])

    def _slope_beyond(self) -> float:
        unknown = _UNKNOWN_ROW_SHARE / self._plain.size
        if len(self._sizes) == 1:
            return unknown
        return min(unknown, (self._ratios[-1] - 1.0) / self._sizes[-1])

    def _fit(self) -> None:
        """The rising curve from 1 nearest to the ratios in least squares (pool adjacent
        violators)."""
        groups: list[tuple[float, int, list[float]]] = []
        for timings in sorted(self._drafted.values(), key=lambda t: t.size):
            mean, weight, sizes = max(1.0, timings.value), timings.weight, [timings.size]
            while groups and groups[-1][0] >= mean:
                other_mean, other_weight, other_sizes = groups.pop()
                mean = (mean * weight + other_mean * other_weight) / (weight + other_weight)
                weight += other_weight
                sizes = other_sizes + sizes
            groups.append((mean, weight, sizes))
        self._sizes = [0.0, *(size for _, _, sizes in groups for size in sizes)]
        self._ratios = [1.0, *(mean for mean, _, sizes in groups for _ in sizes)]


class StepCost:
    """The curves of all numbers of rows."""

    def __init__(self) -> None:
        self._curves: dict[int, DraftCurve] = {}

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """A step of `num_rows` tokens, and so many drafts beside, took so long."""
        curve = self._curves.get(rounded(num_rows, 3))
        if curve is None and num_drafts == 0:
            curve = self._curves[rounded(num_rows, 3)] = DraftCurve()
        if curve is not None:
            curve.observe(num_rows, num_drafts, seconds)

    def curve(self, num_rows: int) -> DraftCurve | None:
        """None before the first step of about so many rows."""
        return self._curves.get(rounded(num_rows, 3))
