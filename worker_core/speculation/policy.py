"""How many drafts of each sequence a step verifies. Pure: chances and costs in, lengths out.

A draft at place j of a proposal gives a token if it and all before it are right: chance first *
later^(j - 1). Over all sequences the best drafts go first; as many are taken as give the most
tokens per second, counting what a step of that size and drafting take. Under load a row costs what
it gives elsewhere, and nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Share of a chance that is counted on: chances and costs are estimates, and what is certain should
#: not be risked for less.
CAUTION = 0.8

#: A draft less likely to give a token is never worth a row.
MIN_CHANCE = 0.1

#: Numbers of drafts are tried one by one up to this one, beyond it in steps of this share of them.
_NUM_FINE, _COARSENESS = 16, 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that may have drafts. first, later: chances that its first draft, and each after a
    right one, is right."""

    first: float
    later: float
    max_num_drafts: int


@dataclass(frozen=True, slots=True)
class StepPrices:
    """What the step costs, by what is added to it.

    num_rows: of the step without drafts; each gives a token. max_num_drafts: most drafts in all,
    each of which adds a row.
    step_s: seconds of the step, by its drafts. draft_s: seconds of drafting, by sequences and most
    drafts of one.
    """

    num_rows: int
    max_num_drafts: int
    step_s: Callable[[int], float]
    draft_s: Callable[[int, int], float]


def choose_lengths(candidates: Sequence[Candidate], prices: StepPrices) -> list[int]:
    """Drafts of each candidate that make the step's tokens per second highest."""
    drafts = _by_chance(candidates)[: prices.max_num_drafts]
    num_tokens, num_drafting, longest = float(prices.num_rows), 0, 0
    best_rate = num_tokens / prices.step_s(0)
    best_count = 0
    for count, (less_chance, place, _) in enumerate(drafts, start=1):
        num_tokens -= CAUTION * less_chance
        num_drafting += place == 1
        longest = max(longest, place)
        if count > _NUM_FINE and count % (count // _COARSENESS) and count < len(drafts):
            continue
        step_s = prices.step_s(count)
        rate = num_tokens / (step_s + prices.draft_s(num_drafting, longest))
        if rate > best_rate:
            best_rate, best_count = rate, count
    lengths = [0] * len(candidates)
    for _, _, index in drafts[:best_count]:
        lengths[index] += 1
    return lengths


def _by_chance(candidates: Sequence[Candidate]) -> list[tuple[float, int, int]]:
    """(less its chance, place in its proposal from 1, candidate) of all drafts, the likeliest
    first, none before those that it builds on."""
    drafts = []
    for index, candidate in enumerate(candidates):
        chance = candidate.first
        for place in range(1, candidate.max_num_drafts + 1):
            if chance < MIN_CHANCE:
                break
            drafts.append((-chance, place, index))
            chance *= candidate.later
    drafts.sort()
    return drafts
