"""How long next tokens may wait for prompts computed beside sequences that decode. Pure.

The measure is the worker's own: the 99th percentile of the gaps between two tokens, of steps
without a prompt. A gap beside one may take TAIL_FACTOR times that, less the 99th percentile of what
gaps take beyond the usual time of their step: others use the machine, too.

The percentile says nothing of the longest gaps: LONG_SHARE of all may be of any length. This share
is saved up while sequences decode, and spent on whole chunks of a prompt. Small chunks at any time
and whole ones now and then give a prompt much more than small ones alone.
"""

from __future__ import annotations

import math

#: 99th percentile of gaps beside small chunks of prompts, in units of that of gaps without.
TAIL_FACTOR = 1.2
#: Share of gaps that may be longer than that; and how many steps' worth of them is saved up at
#: most.
LONG_SHARE, MAX_LONG_STEPS = 0.003, 4

#: Gaps are kept by powers of this, so that the percentile is right to a twentieth; it is looked up
#: after so many steps, and older gaps weigh less then. What weighs next to nothing is dropped.
_LOG_RATIO = math.log(1.05)
_LOOKUP_STEPS, _FADING, _LEAST_WEIGHT = 64, 0.98, 1e-3
_SHORTEST_S = 1e-6


class _Percentile:
    """The 99th of what was observed lately, by weight. Times in seconds."""

    def __init__(self) -> None:
        self._weights: dict[int, float] = {}
        """Of times, by the power that they are rounded up to."""
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
        faded = ((power, weight * _FADING) for power, weight in self._weights.items())
        self._weights = {power: weight for power, weight in faded if weight > _LEAST_WEIGHT}


class ItlBudget:
    """Of one worker. Times in seconds."""

    def __init__(self) -> None:
        self._gap = _Percentile()
        self._excess = _Percentile()
        self._num_saved = 0.0
        """Gaps that may be long."""

    def spare_s(self, step_s: float) -> float:
        """How much longer a step may take that takes so long without a prompt; 0 before anything is
        known."""
        return max(0.0, TAIL_FACTOR * self._gap.value_s - self._excess.value_s - step_s)

    def on_step(self, num_decoding: int, gap_s: float, step_s: float) -> None:
        """A step without a prompt ended so many gaps. step_s: what such a step usually takes."""
        self._gap.observe(gap_s, num_decoding)
        self._excess.observe(gap_s - step_s, num_decoding)
        self._save(num_decoding)

    def on_step_beside(self, num_decoding: int, *, is_long: bool) -> None:
        """A step with a prompt ended so many; is_long: with a whole chunk of it."""
        self._save(num_decoding)
        if is_long:
            self._num_saved -= num_decoding

    def allows_long(self, num_decoding: int) -> bool:
        """Whether the next tokens of so many sequences may wait for a whole chunk."""
        return self._num_saved >= num_decoding

    def _save(self, num_decoding: int) -> None:
        most = MAX_LONG_STEPS * num_decoding
        self._num_saved = min(self._num_saved + LONG_SHARE * num_decoding, most)
