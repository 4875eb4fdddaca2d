"""The gap rule without a target: the 99th percentile of gaps stays near that without prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from worker_core.gap_rule import Pace

#: Bound on the 99th percentile of gaps beside small chunks, relative to that of gaps without
#: prompts.
TAIL_FACTOR = 1.2
#: Share of gaps exempt from that bound, and the maximum saved up, in steps.
LONG_SHARE, MAX_LONG_STEPS = 0.003, 4

#: Gaps are bucketed by powers of this ratio, for a percentile within 5 %. The percentile is updated
#: every _LOOKUP_STEPS observations, which also decays the weights; buckets below _LEAST_WEIGHT are
#: dropped.
_LOG_RATIO = math.log(1.05)
_LOOKUP_STEPS, _GAP_FADING, _LEAST_WEIGHT = 64, 0.98, 1e-3
_SHORTEST_S = 1e-6


class _Percentile:
    """Weighted 99th percentile of recent observations. Times in seconds."""

    def __init__(self) -> None:
        self._weights: dict[int, float] = {}
        """Weight by bucket: the exponent that a time is rounded up to."""
        self._num_observations = 0
        self.value_s = 0.0

    def observe(self, seconds: float, weight: float) -> None:
        power = math.ceil(math.log(max(seconds, _SHORTEST_S)) / _LOG_RATIO)
        self._weights[power] = self._weights.get(power, 0.0) + weight
        if self._num_observations % _LOOKUP_STEPS == 0:
            self._look_up()
        self._num_observations += 1

    def _look_up(self) -> None:
        num_left = 0.01 * sum(self._weights.values())
        for power in sorted(self._weights, reverse=True):
            num_left -= self._weights[power]
            if num_left < 0:
                self.value_s = math.exp(power * _LOG_RATIO)
                break
        faded = ((power, weight * _GAP_FADING) for power, weight in self._weights.items())
        self._weights = {power: weight for power, weight in faded if weight > _LEAST_WEIGHT}


@dataclass(frozen=True, slots=True)
class KeepPercentile:
    """Implements GapRule: the 99th percentile of gaps stays near what it is without prompts.

    max_factor: maximum slowdown of a step by a small chunk.
    """

    max_factor: float = 10.0
    tpot_s = None

    def new_budget(self) -> ItlBudget:
        return ItlBudget(self.max_factor)


class ItlBudget:
    """Implements GapBudget.

    The reference is the worker's own 99th percentile of inter-token gaps in steps without a prompt.
    A gap beside a prompt may take TAIL_FACTOR times that, less the 99th percentile of the jitter
    (gap minus usual step time), since other processes use the machine, too.

    A 99th percentile does not bound the longest gaps, so LONG_SHARE of all gaps may have any
    length. This share is saved up while sequences decode, and spent on whole chunks of a prompt.
    Small chunks plus occasional whole ones serve a prompt much faster than small ones alone.
    """

    def __init__(self, max_factor: float) -> None:
        self._max_factor = max_factor
        self._gap = _Percentile()
        self._excess = _Percentile()
        self._num_saved = 0.0
        """Long gaps saved up."""

    def spare_s(self, step_s: float, paces: Iterable[Pace] = ()) -> float:  # noqa: ARG002
        """See GapBudget. 0 before the first measurement."""
        spare_s = TAIL_FACTOR * self._gap.value_s - self._excess.value_s - step_s
        return max(0.0, min(spare_s, (self._max_factor - 1) * step_s))

    def on_step(self, num_decoding: int, gap_s: float, step_s: float) -> None:
        """See GapBudget."""
        self._gap.observe(gap_s, num_decoding)
        self._excess.observe(gap_s - step_s, num_decoding)
        self._save(num_decoding)

    def on_step_beside(self, num_decoding: int, *, is_long: bool) -> None:
        """See GapBudget."""
        self._save(num_decoding)
        if is_long:
            self._num_saved -= num_decoding

    def allows_long(self, num_decoding: int) -> bool:
        """Whether the savings pay for a whole chunk."""
        return self._num_saved >= num_decoding

    def _save(self, num_decoding: int) -> None:
        most = MAX_LONG_STEPS * num_decoding
        self._num_saved = min(self._num_saved + LONG_SHARE * num_decoding, most)
