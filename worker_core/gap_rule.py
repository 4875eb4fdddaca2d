"""How long prompts may make the gaps between the tokens of decoding sequences. A rule is a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Pace:
    """How far a decoding sequence is ahead of its target.

    due_s: seconds from now until its next token is due. num_left: maximum further tokens. tpot_s:
    mean gap that it is to keep.
    """

    due_s: float
    num_left: int
    tpot_s: float


class GapBudget(Protocol):
    """What is left of what a rule allows. Times in seconds."""

    def spare_s(self, step_s: float, paces: Iterable[Pace]) -> float:
        """Seconds by which the next step may exceed `step_s`, its time without a prompt. paces: of
        the decoding sequences; read only by rules with a target."""
        ...

    def allows_long(self, num_decoding: int) -> bool:
        """Whether the next step may exceed that by any time."""
        ...

    def on_step(self, num_decoding: int, gap_s: float, step_s: float) -> None:
        """Record a step without a prompt that ended `num_decoding` gaps. step_s: usual time of such
        a step."""
        ...

    def on_step_beside(self, num_decoding: int, *, is_long: bool) -> None:
        """Record a step with a prompt that ended `num_decoding` gaps. is_long: whether it exceeded
        `spare_s`."""
        ...


class GapRule(Protocol):
    """A rule for gaps."""

    @property
    def tpot_s(self) -> float | None:
        """Target of the mean gap of each sequence; None if the rule has none."""
        ...

    def new_budget(self) -> GapBudget: ...
