"""How a prefill step's token budget is shared out. Pure: state in, plan out.

By rank (priority, then arrival), each job takes as many tokens as it lacks while the budget lasts, so that the first
prompt is finished first (time to first token, not fairness, is what this tier is for) and short ones fill the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from baton.types import Rank


class Computable(Protocol):
    """What the scheduler sees of a job that has its blocks."""

    @property
    def rank(self) -> Rank: ...

    @property
    def num_missing_tokens(self) -> int: ...


JobT = TypeVar("JobT", bound=Computable)


def share_budget(jobs: Sequence[JobT], max_num_batched_tokens: int) -> list[tuple[JobT, int]]:
    """Who computes how many tokens in the next step; `jobs` in any order."""
    grants: list[tuple[JobT, int]] = []
    budget = max_num_batched_tokens
    for job in sorted(jobs, key=lambda j: j.rank):
        if budget == 0:
            break
        num_new = min(job.num_missing_tokens, budget)
        budget -= num_new
        grants.append((job, num_new))
    return grants
