"""Computes figures from answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.peers.task import Answer, Task

#: The engine a second time: what differs from the first is noise.
AGAIN = "baton again"


@dataclass(frozen=True, slots=True)
class Figure:
    """One contender at one task; medians over all rounds, best of all. prompt_ms: per prompt.

    agreement: share of the reference's tokens before the first difference; None without a
    reference. chunk: tokens of a prompt's chunk that it ran with; 0 for its only way.
    """

    model: str
    dtype: str
    contender: str
    batch: int
    context: int
    num_tokens: int
    num_rounds: int
    prompt_ms: float
    step_ms: float
    best_step_ms: float
    agreement: float | None
    chunk: int = 0


def agreement(ours: Answer, reference: Answer) -> float:
    """Mean over the prompts."""
    shares = [
        _num_common(mine, theirs) / len(theirs)
        for mine, theirs in zip(ours.token_ids, reference.token_ids, strict=True)
    ]
    return sum(shares) / len(shares)


def _num_common(mine: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(mine, theirs, strict=False)
    return next(
        (index for index, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(theirs))
    )


def figure_of(
    model: str,
    dtype: str,
    contender: str,
    task: Task,
    answers: Sequence[Answer],
    reference: Answer | None,
    chunk: int = 0,
) -> Figure:
    """Raises ValueError without answers."""
    if not answers:
        raise ValueError(f"{contender} answered nothing")
    steps_s = [step for answer in answers for step in answer.steps_s]
    return Figure(
        model=model,
        dtype=dtype,
        contender=contender,
        batch=task.batch,
        context=task.context,
        num_tokens=task.num_tokens,
        num_rounds=len(answers),
        prompt_ms=median(answer.prefill_s for answer in answers) / task.batch * 1e3,
        step_ms=median(steps_s) * 1e3,
        best_step_ms=min(steps_s) * 1e3,
        agreement=None if reference is None else agreement(answers[-1], reference),
        chunk=chunk,
    )
