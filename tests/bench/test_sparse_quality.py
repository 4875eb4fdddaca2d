"""Tasks and table of what sparse decode costs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.sparse_quality import Case, cases_of, measure, table_of
from engine.interface import Batch


@pytest.mark.slow
def test_answers_are_in_their_prompts() -> None:
    cases = list(cases_of(2, 300))
    assert len(cases) == 8
    for case in cases:
        assert 290 <= len(case.prompt) <= 700
        places = range(len(case.prompt) - len(case.answer) + 1)
        is_there = any(case.prompt[i : i + len(case.answer)] == case.answer for i in places)
        assert is_there or case.task == "text"
    assert cases == list(cases_of(2, 300))


class Counting:
    """Likeliest is the token after the last one, with probability 1/2; others have 1/6."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(num_blocks=1)
        self.num_new: list[int] = []

    def logits(self, batch: Batch) -> torch.Tensor:
        (part,) = batch.slices
        self.num_new.append(len(part.token_ids))
        row = torch.zeros(1, 4)
        row[0, (part.token_ids[-1] + 1) % 4] = math.log(3)
        return row


def test_the_answers_own_tokens_are_scored_one_a_step() -> None:
    engine: Any = Counting()
    case = Case("keys", (0, 1, 2), (3, 1, 2))
    (found,) = measure(("auto",), [case], lambda *_: engine)
    assert found.likeliest == pytest.approx(2 / 3)
    assert found.perplexity == pytest.approx((2 * 6 * 2) ** (1 / 3))
    assert engine.num_new == [3, 1, 1]


@pytest.mark.slow
def test_a_budget_of_the_whole_context_costs_nothing() -> None:
    cases = [Case("repeat", tuple(range(100, 160)) * 2, tuple(range(100, 106)))]
    full, same, few = measure(("auto", "sink-window:160", "sink-window:32"), cases)
    assert (full.likeliest, full.perplexity) == (same.likeliest, same.perplexity)
    assert few.perplexity != full.perplexity
    assert "| `sink-window:32` |" in table_of([full, same, few])
