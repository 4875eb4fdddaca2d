"""The gap rule with a target: each step computes as much of waiting prompts as the paces of all
decoding sequences leave time for.

A sequence that was faster than its target has time saved up, which a prompt may use: the mean gap
of each sequence is what the target bounds. No single gap exceeds `max_gap_s`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from worker_core.gap_rule import Pace

#: Share of a target that is planned with; the rest is for what estimates miss.
TARGET_SHARE = 0.9
#: Maximum single gap, relative to the target of the mean gap.
MAX_GAP_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class KeepTarget:
    """Implements GapRule. tpot_s: what is planned with; None to bound only single gaps. max_gap_s:
    maximum gap beside a prompt. Seconds."""

    tpot_s: float | None
    max_gap_s: float

    @classmethod
    def of_tpot(cls, tpot_s: float) -> KeepTarget:
        """The rule that keeps a mean gap of `tpot_s`."""
        return cls(TARGET_SHARE * tpot_s, MAX_GAP_FACTOR * tpot_s)

    def new_budget(self) -> SloBudget:
        return SloBudget(self)


class SloBudget:
    """Implements GapBudget; it keeps no state."""

    def __init__(self, rule: KeepTarget) -> None:
        self._tpot_s = inf if rule.tpot_s is None else rule.tpot_s
        self._max_gap_s = rule.max_gap_s

    def spare_s(self, step_s: float, paces: Iterable[Pace]) -> float:
        """See GapBudget. Where the step alone misses the target, prompts get as much time as it:
        nothing they leave would save the target.

        A sequence that cannot reach its target any more does not count.
        """
        spare_s = self._max_gap_s - step_s
        if spare_s <= 0 or self._tpot_s <= step_s:
            return step_s
        for pace in paces:
            saved_s = pace.num_left * (pace.tpot_s - step_s)
            if pace.due_s - step_s < spare_s and pace.due_s + saved_s >= step_s:
                spare_s = pace.due_s - step_s
        return max(0.0, spare_s)

    def allows_long(self, num_decoding: int) -> bool:  # noqa: ARG002
        return False

    def on_step(self, num_decoding: int, gap_s: float, step_s: float) -> None:
        pass

    def on_step_beside(self, num_decoding: int, *, is_long: bool) -> None:
        pass
