"""The sampling ops against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton_kernels.sampling import (
    NOT_FINITE,
    TOP_P_CANDIDATES,
    Draw,
    add_bias,
    draw_rows,
    forbid,
    gumbel_argmax,
    hash_uniform,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize,
)

NEG = float("-inf")


def random_keys(rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (rows, 2), generator=generator).to(torch.int32)


def test_penalize() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0], [4.0, 1.0, 0.0]])
    penalize(
        logits,
        torch.tensor([0, 0, 1]),
        torch.tensor([0, 1, 0]),
        torch.tensor([0.0, 2.0, 1.0]),
        torch.tensor([2.0, 2.0, 1.0]),
        torch.tensor([0.5, 0.5, 0.25]),
        torch.tensor([0.1, 0.1, 0.5]),
    )
    wanted = [[1.0, -4.0 - 0.5 - 0.2, 1.0], [4.0 - 0.25 - 0.5, 1.0, 0.0]]
    torch.testing.assert_close(logits, torch.tensor(wanted))


def test_add_bias() -> None:
    logits = torch.zeros(2, 3)
    add_bias(logits, torch.tensor([0, 1]), torch.tensor([2, 0]), torch.tensor([1.5, NEG]))
    assert logits.tolist() == [[0, 0, 1.5], [NEG, 0, 0]]


def test_forbid() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    forbid(logits, torch.tensor([[True, False], [False, False]]))
    assert logits.tolist() == [[NEG, 2], [3, 4]]


def test_keep_top_k_keeps_equals_of_the_last() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0], [1.0, 3.0, 2.0, 2.0], [1.0, 3.0, 2.0, 2.0]])
    keep_top_k(logits, torch.tensor([1, 2, 4]))
    assert logits.tolist() == [[NEG, 3, NEG, NEG], [NEG, 3, 2, 2], [1, 3, 2, 2]]


def test_keep_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = torch.tensor([[0.1, 0.4, 0.25, 0.25]])
    for top_p, kept in (
        (1e-9, [1]),
        (0.39, [1]),
        (0.41, [1, 2]),
        (0.66, [1, 2, 3]),
        (0.95, [0, 1, 2, 3]),
    ):
        logits = probabilities.log()
        keep_top_p(logits, torch.tensor([top_p]))
        assert torch.nonzero(logits[0] > NEG).flatten().tolist() == kept


def test_equals_enter_the_set_of_top_p_by_id() -> None:
    logits = torch.zeros(1, 10)
    keep_top_p(logits, torch.tensor([0.35]))
    assert torch.nonzero(logits[0] > NEG).flatten().tolist() == [0, 1, 2, 3]


def test_top_p_of_flat_and_steep_rows_together() -> None:
    """Rows with a set beyond the quick path's candidates, beside rows with a set within them."""
    generator = torch.Generator().manual_seed(0)
    vocab = 5 * TOP_P_CANDIDATES
    spread = torch.tensor([0.01, 5.0, 0.5, 20.0])[:, None]
    logits = torch.randn(4, vocab, generator=generator) * spread
    for top_p in (0.1, 0.5, 0.95, 0.9999):
        ordered, order = logits.double().sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        edge = ((before - top_p).abs() < 1e-6).any(-1)
        wanted = torch.zeros(4, vocab, dtype=torch.bool).scatter_(1, order, before < top_p)
        got = logits.clone()
        keep_top_p(got, torch.full((4,), top_p))
        assert edge.sum() < 4
        assert torch.equal((got > NEG)[~edge], wanted[~edge])
        alone = logits[2:3].clone()
        keep_top_p(alone, torch.tensor([top_p]))
        assert torch.equal(alone, got[2:3])


def test_keep_min_p() -> None:
    probabilities = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    for min_p, kept in ((0.0, [0, 1, 2, 3]), (0.25, [1, 2, 3]), (0.4, [1, 3]), (1.0, [1])):
        logits = probabilities.log()
        keep_min_p(logits, torch.tensor([min_p]))
        assert torch.nonzero(logits[0] > NEG).flatten().tolist() == kept


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    """Moments, neighbours and rows: each statistic within five standard deviations."""
    count = 40_000
    numbers = hash_uniform(random_keys(4), count).double()
    assert float(numbers.min()) > 0
    assert float(numbers.max()) < 1
    spread = math.sqrt(1 / 12)
    for row in numbers:
        assert abs(float(row.mean()) - 0.5) < 5 * spread / math.sqrt(count)
        buckets = torch.histc(row, bins=64, min=0, max=1)
        statistic = float(((buckets - count / 64) ** 2 / (count / 64)).sum())
        assert abs(statistic - 63) < 5 * math.sqrt(2 * 63)
    centred = (numbers - 0.5) / spread
    for lag in (1, 2, 64):
        assert abs(float((centred[:, lag:] * centred[:, :-lag]).mean())) < 5 / math.sqrt(4 * count)
    correlation = centred @ centred.T / count - torch.eye(4)
    assert float((correlation - correlation.diag().diag()).abs().max()) < 5 / math.sqrt(count)


@pytest.mark.parametrize("bit", [0, 15, 31])
@pytest.mark.parametrize("word", [0, 1])
def test_each_bit_of_a_key_changes_every_number(bit: int, word: int) -> None:
    keys = random_keys(1, seed=bit)
    other = keys.clone()
    other[0, word] ^= (1 << bit) if bit < 31 else -(1 << 31)
    pair = hash_uniform(torch.cat((keys, other)), 20_000).double() - 0.5
    assert abs(float((pair[0] * pair[1]).mean()) * 12) < 5 / math.sqrt(20_000)


def test_numbers_do_not_depend_on_how_many_are_made() -> None:
    keys = random_keys(3)
    assert torch.equal(hash_uniform(keys, 100)[:, :40], hash_uniform(keys, 40))
    assert torch.equal(hash_uniform(keys, 100)[1:2], hash_uniform(keys[1:2], 100))


def test_gumbel_argmax_never_takes_a_filtered_token() -> None:
    logits = torch.full((200, 9), NEG)
    logits[:, 4] = -80.0
    logits[:, 7] = -81.0
    chosen = gumbel_argmax(logits, random_keys(200))
    assert set(chosen.tolist()) == {4, 7}


#: Sizes of vocabularies: as large as models have, and some that are no multiple of a kernel's
#: block.
VOCABS = st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 1000, 4096, 33_000])


@st.composite
def draws_of_rows(draw: st.DrawFn) -> tuple[torch.Tensor, list[Draw]]:
    """Logits like a model's, some rows of which are coarse, so that many are equal, or have tokens
    that may not be chosen; and how they are drawn from."""
    vocab_size, seed = draw(VOCABS), draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    draws = draw(
        st.lists(
            st.builds(
                Draw,
                temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.5, 30.0]),
                top_k=st.sampled_from([0, 0, 1, 2, 40, 300]),
                top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.05, 0.9999]),
                min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
                key=st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 2),
            ),
            min_size=1,
            max_size=5,
        )
    )
    logits = torch.randn(len(draws), vocab_size, generator=generator)
    logits *= draw(st.sampled_from([0.0, 0.3, 3.0, 12.0]))
    if draw(st.booleans()):
        logits = (2 * logits).round() / 2
    if draw(st.booleans()):
        logits[torch.rand(logits.shape, generator=generator) < 0.3] = NEG
        logits[:, seed % vocab_size] = 1.0
    return logits, draws


def noisy(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """logits [vocab]: what the token is the argmax of, before any filter, float64."""
    scaled = (logits - logits.max()).double() / draw.temperature
    uniform = hash_uniform(torch.tensor([draw.key], dtype=torch.int32), len(logits))[0].double()
    return scaled - (-(-uniform).log1p()).log()


def assert_drawn_as_by_the_ops(
    logits: torch.Tensor, draws: list[Draw], chosen: torch.Tensor
) -> None:
    for row, (own, how) in enumerate(zip(logits, draws, strict=True)):
        near = [how._replace(top_p=min(1.0, how.top_p * c)) for c in (1.0, 1 - 1e-5, 1 + 1e-5)]
        wanted = {int(draw_rows.twin(own[None], [each])[0]) for each in near}
        if int(chosen[row]) not in wanted:
            assert how.temperature
            values = noisy(own, how)[[int(chosen[row]), *wanted]]
            assert values.max() - values.min() < 1e-4


@given(draws_of_rows())
def test_rows_are_drawn_as_by_the_ops_one_by_one(case: tuple[torch.Tensor, list[Draw]]) -> None:
    """Two tokens may change places only where their noisy logits, or the set of top_p, are equal
    but for rounding."""
    logits, draws = case
    chosen, verdicts = draw_rows(logits.clone(), draws)
    assert ((chosen >= 0) & (chosen < logits.shape[1])).all()
    is_finite = logits.isfinite().all(-1)
    assert torch.equal(verdicts, torch.where(is_finite, chosen, NOT_FINITE))
    assert_drawn_as_by_the_ops(logits, draws, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_a_nucleus_of_thousands_is_that_of_the_ops(top_p: float) -> None:
    """Rows enough that a token too few, or too many, is drawn differently somewhere."""
    logits = 0.3 * torch.randn(400, 5000, generator=torch.Generator().manual_seed(3))
    draws = [Draw(0.7, 0, top_p, 0.0, (key, -key)) for key in range(400)]
    chosen, _ = draw_rows(logits, draws)
    assert_drawn_as_by_the_ops(logits, draws, chosen)


@given(draws_of_rows(), st.integers(1, 4))
def test_a_row_is_drawn_as_if_it_were_alone(
    case: tuple[torch.Tensor, list[Draw]], num_threads: int
) -> None:
    logits, draws = case
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together, _ = draw_rows(logits, draws)
    finally:
        torch.set_num_threads(before)
    apart = [draw_rows(logits[row : row + 1], [how])[0] for row, how in enumerate(draws)]
    assert together.tolist() == [int(token) for token in apart]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, NEG])
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_row_that_is_no_numbers_gives_some_token(wrong: float, top_k: int, top_p: float) -> None:
    some = torch.randn(1, 100, generator=torch.Generator().manual_seed(1))
    some[0, 40] = wrong
    for logits in (some, torch.full((1, 100), wrong)):
        chosen, verdicts = draw_rows(logits, [Draw(0.7, top_k, top_p, 0.1, (1, 2))])
        assert 0 <= int(chosen) < 100
        assert verdicts.tolist() == [NOT_FINITE]
