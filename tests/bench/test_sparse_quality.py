"""Tasks and table of what sparse decode costs."""

from __future__ import annotations

import pytest

from bench.sparse_quality import Case, cases_of, measure, table_of


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


@pytest.mark.slow
def test_a_budget_of_the_whole_context_costs_nothing() -> None:
    cases = [Case("repeat", tuple(range(100, 160)) * 2, tuple(range(100, 106)))]
    full, same, few = measure(("auto", "sink-window:160", "sink-window:32"), cases)
    assert (full.likeliest, full.perplexity) == (same.likeliest, same.perplexity)
    assert few.perplexity != full.perplexity
    assert "| `sink-window:32` |" in table_of([full, same, few])
