"""Tasks and answers of contenders. Standard library only: peers run in environments of their
own."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """`batch` prompts of `context` tokens each, with `num_tokens` >= 2 greedy tokens generated
    after each, all at once."""

    batch: int
    context: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """prefill_s: until all prompts have their first token. steps_s: each later step of the batch,
    or means of several.

    token_ids: all `num_tokens` generated after each prompt.
    """

    prefill_s: float
    steps_s: tuple[float, ...]
    token_ids: tuple[tuple[int, ...], ...]


class Contender(Protocol):
    """One way to run a model."""

    def run(self, task: Task) -> Answer: ...


def prompts_of(task: Task, vocab_size: int) -> list[list[int]]:
    """Random tokens, the same for every contender."""
    rng = random.Random(task.batch * 1_000_003 + task.context)
    return [[rng.randrange(10, vocab_size) for _ in range(task.context)] for _ in range(task.batch)]


def emit(answer: Answer) -> None:
    """Print as one line of JSON."""
    sys.stdout.write(json.dumps(asdict(answer)) + "\n")
    sys.stdout.flush()


def serve(contender: Contender) -> None:
    """Answer tasks, one per line of stdin, until it ends."""
    for line in sys.stdin:
        emit(contender.run(Task(**json.loads(line))))
