"""The native checked_argmax gives what its twin gives: ties, what is no number, and any size."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.sampling import NOT_FINITE, checked_argmax

#: Around 16 lanes and the 64 logits that are looked at at once.
SIZES = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 200, 1000]
NO_NUMBERS = [float("nan"), -float("nan"), float("inf"), float("-inf")]


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num_values", [1, 3, 1 << 20])
def test_it_is_the_twin(vocab_size: int, num_values: int) -> None:
    """Few values: many equals, of which the lowest id is chosen."""
    generator = torch.Generator().manual_seed(vocab_size)
    shape = (301, vocab_size)
    logits = torch.randint(-num_values, num_values, shape, generator=generator).float()
    for got, wanted in zip(checked_argmax(logits), checked_argmax.twin(logits), strict=True):
        assert got.dtype == torch.int64
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_largest_is_found_wherever_it_is(vocab_size: int) -> None:
    logits = torch.full((vocab_size, vocab_size), -3e38).fill_diagonal_(-2e38)
    for found in checked_argmax(logits):
        assert found.tolist() == list(range(vocab_size))


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_is_no_number_shows_wherever_it_is_and_in_its_row_alone(
    vocab_size: int, value: float
) -> None:
    """A row of its own for each place, between rows that are finite."""
    logits = torch.randn(2 * vocab_size, vocab_size, generator=torch.Generator().manual_seed(1))
    places = torch.arange(vocab_size)
    logits[2 * places, places] = value
    chosen, verdicts = checked_argmax(logits)
    assert verdicts[::2].tolist() == [NOT_FINITE] * vocab_size
    assert torch.equal(verdicts[1::2], logits[1::2].argmax(-1))
    assert torch.equal(chosen[1::2], verdicts[1::2])
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < vocab_size
    assert torch.equal(checked_argmax.twin(logits)[1], verdicts)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_of_a_row_without_numbers_some_token_is_told(value: float) -> None:
    chosen, verdicts = checked_argmax(torch.full((3, 70), value))
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < 70
    assert verdicts.tolist() == [NOT_FINITE] * 3


def test_zeros_of_either_sign_are_equal_and_tiny_numbers_are_not() -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0], [0.0, 1e-45, 0.0]])
    assert checked_argmax(logits)[1].tolist() == [1, 1, 1]


def test_rows_that_lie_apart() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    for part in (logits[::2], logits[:, 3:40], logits[:1].expand(4, -1), logits[:0]):
        for got, wanted in zip(checked_argmax(part), checked_argmax.twin(part), strict=True):
            assert torch.equal(got, wanted)
