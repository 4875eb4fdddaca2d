"""The pure schedulers: budgets are kept, ranks are honoured, and someone always goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from worker_core.scheduler import Budget, plan_step


@dataclass(frozen=True)
class Fake:
    rank: tuple[int, int, str, int]
    num_computed_tokens: int
    num_missing_tokens: int
    num_blocks: int
    num_exclusive_blocks: int
    min_new_tokens: int = 1

    @property
    def is_prefilling(self) -> bool:
        return self.num_missing_tokens > 1

    def num_blocks_to_write(self, num_new: int) -> int:
        return max(0, -(-(self.num_computed_tokens + num_new) // BLOCK) - self.num_blocks)


BLOCK = 4


@st.composite
def fakes(draw: st.DrawFn) -> list[Fake]:
    sequences = []
    for index in range(draw(st.integers(0, 8))):
        computed = draw(st.integers(0, 30))
        missing = draw(st.sampled_from([1, 1, 1, 5, 40]))
        # Room for what is computed, or for a whole prompt that is prefilled here.
        needed = computed if missing == 1 else computed + missing
        blocks = -(-max(needed, 1) // BLOCK)
        exclusive = draw(st.integers(0, blocks))
        sequences.append(
            Fake((draw(st.integers(0, 1)), index, "", 0), computed, missing, blocks, exclusive)
        )
    return draw(st.permutations(sequences))


def by_rank(sequences: Sequence[Fake]) -> list[Fake]:
    return sorted(sequences, key=lambda s: s.rank)


@given(fakes(), st.integers(0, 3), st.integers(1, 64))
def test_a_decode_plan_fits_and_preempts_only_for_better_ranks(
    sequences: list[Fake], num_available: int, budget: int
) -> None:
    plan = plan_step(by_rank(sequences), num_available, Budget(budget, budget))
    granted = [sequence for sequence, _ in plan.grants]
    assert len(set(granted) | set(plan.preempted)) == len(granted) + len(plan.preempted)
    assert sum(num_new for _, num_new in plan.grants) <= budget
    assert all(1 <= n <= s.num_missing_tokens for s, n in plan.grants)
    freed = sum(s.num_exclusive_blocks for s in plan.preempted)
    assert sum(s.num_blocks_to_write(n) for s, n in plan.grants) <= num_available + freed
    if plan.preempted:
        best_victim = min(s.rank for s in plan.preempted)
        takers = [s for s, n in plan.grants if s.num_blocks_to_write(n)]
        staying = [s for s in sequences if s not in plan.preempted]
        assert all(s.rank < best_victim for s in staying)
        assert takers or any(s.num_blocks_to_write(1) for s in staying)


@given(fakes(), st.integers(0, 3))
def test_the_best_ranked_decoding_sequence_runs_if_any_memory_can_be_had(
    sequences: list[Fake], num_available: int
) -> None:
    decoding = [s for s in sequences if s.num_missing_tokens == 1]
    if not decoding:
        return
    best = min(decoding, key=lambda s: s.rank)
    others = sum(s.num_exclusive_blocks for s in sequences if s.rank > best.rank)
    plan = plan_step(by_rank(sequences), num_available, Budget(64, 64))
    can_run = best.num_blocks_to_write(1) <= num_available + others
    assert (best in [s for s, _ in plan.grants]) == can_run


@given(fakes(), st.integers(1, 64))
def test_decoding_goes_before_prefilling(sequences: list[Fake], budget: int) -> None:
    plan = plan_step(by_rank(sequences), 1000, Budget(budget, budget))
    assert not plan.preempted
    decoding = [s for s in sequences if s.num_missing_tokens == 1]
    served = [s for s, _ in plan.grants if s.num_missing_tokens == 1]
    assert len(served) == min(len(decoding), budget)


@given(fakes(), st.integers(1, 64))
def test_prompts_first_share_the_whole_budget_by_rank(jobs: list[Fake], budget: int) -> None:
    prompts = [job for job in jobs if job.is_prefilling]
    plan = plan_step(by_rank(jobs), 1000, Budget(budget, budget, prompts_first=True))
    grants = [(job, n) for job, n in plan.grants if job.is_prefilling]
    assert sum(n for _, n in grants) == min(budget, sum(j.num_missing_tokens for j in prompts))
    in_order = by_rank(prompts)
    assert [j for j, _ in grants] == in_order[: len(grants)]
    assert all(n == j.num_missing_tokens for j, n in grants[:-1])
    num_left = budget - sum(n for _, n in grants)
    assert len(plan.grants) - len(grants) == min(num_left, len(jobs) - len(prompts))


@given(fakes(), st.integers(1, 64), st.integers(0, 64))
def test_sequences_that_decode_get_what_prompts_may_not_use(
    jobs: list[Fake], num_tokens: int, num_prefill_tokens: int
) -> None:
    budget = Budget(num_tokens, min(num_prefill_tokens, num_tokens), prompts_first=True)
    plan = plan_step(by_rank(jobs), 1000, budget)
    num_prefilled = sum(n for job, n in plan.grants if job.is_prefilling)
    num_decoding = sum(not job.is_prefilling for job in jobs)
    assert num_prefilled <= num_prefill_tokens
    num_decoded = sum(not job.is_prefilling for job, _ in plan.grants)
    assert num_decoded == min(num_decoding, num_tokens - num_prefilled)
