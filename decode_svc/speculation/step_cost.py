"""How long a step takes, learned from the steps that were made.

For each number of sequences (rounded), a curve of seconds over rows: rising, linear between what was measured. On a shared
machine a step may take longer than it should, by a lot and several times in a row, but never less: so a low quantile of the last
few timings of a size stands for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque

#: Beyond what was measured, a row is taken to cost this share of the average row of the largest measured step.
_UNKNOWN_ROW_SHARE = 0.5

#: Timings of one size that count, and how many of them are below the one that stands for all, as a divisor.
_NUM_TIMINGS = 9
_QUANTILE = 4


def rounded(number: int, num_bits: int) -> int:
    """`number` with only its first `num_bits` binary digits kept."""
    shift = max(0, number.bit_length() - num_bits)
    return number >> shift << shift


class _Point:
    """The last timings of steps of about the same size."""

    def __init__(self) -> None:
        self._timings: deque[tuple[float, int]] = deque(maxlen=_NUM_TIMINGS)
        self.seconds = 0.0
        self.num_rows = 0.0

    @property
    def weight(self) -> int:
        return len(self._timings)

    def add(self, num_rows: int, seconds: float) -> None:
        self._timings.append((seconds, num_rows))
        self.seconds = sorted(self._timings)[(self.weight - 1) // _QUANTILE][0]
        self.num_rows = sum(rows for _, rows in self._timings) / self.weight


class RowCurve:
    """Seconds over rows, never falling."""

    def __init__(self) -> None:
        self._points: defaultdict[int, _Point] = defaultdict(_Point)
        self._rows: list[float] = []
        self._seconds: list[float] = []

    def observe(self, num_rows: int, seconds: float) -> None:
        self._points[rounded(num_rows, 5)].add(num_rows, seconds)
        self._fit()

    def seconds(self, num_rows: int) -> float:
        """Seconds of a step of `num_rows`. Something must have been observed."""
        rows, seconds = self._rows, self._seconds
        place = bisect_left(rows, num_rows)
        if place == len(rows):
            per_row = _UNKNOWN_ROW_SHARE * seconds[-1] / rows[-1]
            return seconds[-1] + (num_rows - rows[-1]) * min(per_row, self._last_slope(per_row))
        if place == 0:
            return seconds[0]
        share = (num_rows - rows[place - 1]) / (rows[place] - rows[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])

    def _last_slope(self, default: float) -> float:
        if len(self._rows) < 2:
            return default
        return (self._seconds[-1] - self._seconds[0]) / (self._rows[-1] - self._rows[0])

    def _fit(self) -> None:
        """The rising curve nearest to the points in least squares (pool adjacent violators)."""
        groups: list[tuple[float, float, list[float]]] = []
        for point in sorted(self._points.values(), key=lambda p: p.num_rows):
            weight = float(point.weight)
            mean, rows = point.seconds, [point.num_rows]
            while groups and groups[-1][0] >= mean:
                other_mean, other_weight, other_rows = groups.pop()
                mean = (mean * weight + other_mean * other_weight) / (weight + other_weight)
                weight += other_weight
                rows = other_rows + rows
            groups.append((mean, weight, rows))
        self._rows = [row for _, _, rows in groups for row in rows]
        self._seconds = [mean for mean, _, rows in groups for _ in rows]


class StepCost:
    """The curves of all numbers of sequences."""

    def __init__(self) -> None:
        self._curves: dict[int, RowCurve] = {}

    def observe(self, num_sequences: int, num_rows: int, seconds: float) -> None:
        """A step of `num_rows` tokens in all, of `num_sequences` sequences, took so long."""
        self._curves.setdefault(rounded(num_sequences, 3), RowCurve()).observe(num_rows, seconds)

    def curve(self, num_sequences: int) -> RowCurve | None:
        """None before the first step of about so many sequences."""
        return self._curves.get(rounded(num_sequences, 3))
