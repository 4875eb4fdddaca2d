"""Speculation changes no token: what a step emits are the target's own draws, whatever was
drafted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.types import Sampling
from engine.interface import SampleRow
from engine.sampling import sampler
from worker_core.drafting import verify

VOCAB = 6
NUM_DRAFTS = 3
NUM_SEEDS = 2500

tokens = st.integers(0, 3)


@given(st.lists(tokens, max_size=6), st.data())
def test_drafts_are_accepted_up_to_the_first_that_differs(
    drafts: list[int], data: st.DataObject
) -> None:
    draws = data.draw(st.lists(tokens, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    num_accepted = verify(drafts, draws)
    assert drafts[:num_accepted] == draws[:num_accepted]
    assert num_accepted == len(drafts) or drafts[num_accepted] != draws[num_accepted]


def test_draws_that_do_not_fit_the_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match="2 drafts need 3 draws, not 2"):
        verify((1, 2), (1, 2))


@given(st.integers(0, 2**64 - 1), st.data())
def test_whatever_is_drafted_the_tokens_are_those_of_drawing_one_by_one(
    seed: int, data: st.DataObject
) -> None:
    """The target is any function of the prefix; the proposer any adversary."""

    def target(prefix: Sequence[int]) -> int:
        return hash((seed, *prefix)) % 3

    plain: list[int] = []
    while len(plain) < 12:
        plain.append(target(plain))
    output: list[int] = []
    while len(output) < 12:
        drafts = data.draw(st.lists(st.integers(0, 2), max_size=4))
        draws = [target([*output, *drafts[:i]]) for i in range(len(drafts) + 1)]
        output += draws[: verify(drafts, draws) + 1]
    assert output[:12] == plain


def logits_after(prefix: Sequence[int], salt: int) -> torch.Tensor:
    """A made-up model: [VOCAB] float32, a function of the prefix."""
    places = torch.arange(VOCAB, dtype=torch.float32)
    state = salt + sum((i + 2) * (token + 1) for i, token in enumerate(prefix))
    return 1.5 * torch.sin(places * (1.3 + 0.1 * state) + state)


def draw(prefixes: Sequence[Sequence[int]], seeds: Sequence[int], salt: int) -> list[int]:
    """The real sampler on the made-up model: one token after each prefix, with the key of its seed
    and index."""
    logits = torch.stack([logits_after(prefix, salt) for prefix in prefixes])
    rows = [
        SampleRow(0, Sampling(temperature=1.0, seed=seed), prefix, 0)
        for prefix, seed in zip(prefixes, seeds, strict=True)
    ]
    return [one.token_id for one in sampler.draw(logits, rows).samples()]


def drafts_of(seeds: Sequence[int], salt: int) -> list[list[int]]:
    drafts: list[list[int]] = [[] for _ in seeds]
    for _ in range(NUM_DRAFTS):
        for draft, token in zip(drafts, draw(drafts, seeds, salt), strict=True):
            draft.append(token)
    return drafts


def emitted(seeds: Sequence[int], drafts: Sequence[Sequence[int]], salt: int) -> list[list[int]]:
    """The tokens of one step of each seed's sequence, from NUM_DRAFTS + 1 rows."""
    rows = [
        (seed, d[:i]) for seed, d in zip(seeds, drafts, strict=True) for i in range(NUM_DRAFTS + 1)
    ]
    draws = draw([prefix for _, prefix in rows], [seed for seed, _ in rows], salt)
    steps = [draws[i : i + NUM_DRAFTS + 1] for i in range(0, len(draws), NUM_DRAFTS + 1)]
    return [s[: verify(d, s) + 1] for d, s in zip(drafts, steps, strict=True)]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.slow
@pytest.mark.parametrize("is_coupled", [True, False])
def test_emitted_tokens_follow_the_targets_distribution(is_coupled: bool) -> None:
    seeds = list(range(NUM_SEEDS))
    others = seeds if is_coupled else [seed + 10**6 for seed in seeds]
    steps = emitted(seeds, drafts_of(others, salt=3), salt=0)
    first = torch.bincount(torch.tensor([s[0] for s in steps]), minlength=VOCAB)
    # 5 degrees of freedom: beyond 25.7 one time in 10,000, and the seeds are fixed.
    assert chi_square(first, logits_after([], 0).softmax(-1)) < 25.7
    for token in range(VOCAB):
        seconds = [s[1] for s in steps if len(s) > 1 and s[0] == token]
        # A second token exists if the first draft was right, which depends on nothing that it is
        # drawn from.
        counts = torch.bincount(torch.tensor(seconds, dtype=torch.int64), minlength=VOCAB)
        assert chi_square(counts, logits_after([token], 0).softmax(-1)) < 25.7


def test_emitted_tokens_are_those_of_no_speculation() -> None:
    seeds = list(range(200))
    plain = drafts_of(seeds, salt=0)
    for one, step in zip(plain, emitted(seeds, drafts_of(seeds, salt=3), salt=0), strict=True):
        assert step[:NUM_DRAFTS] == one[: len(step)]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("salt", [1, 3])
def test_coupled_drafts_are_accepted_nearly_as_often_as_rejection_sampling_can(salt: int) -> None:
    seeds = list(range(5_000))
    ours, theirs = draw([[]] * len(seeds), seeds, 0), draw([[]] * len(seeds), seeds, salt)
    share = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(seeds)
    p, q = logits_after([], 0).softmax(-1), logits_after([], salt).softmax(-1)
    distance = float((p - q).abs().sum()) / 2
    spread = 4 * math.sqrt(0.25 / len(seeds))
    assert (1 - distance) / (1 + distance) - spread < share < 1 - distance + spread
