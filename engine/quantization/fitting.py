"""Giving up weights one input after the other, so that what those that follow become makes up for
it.

GPTQ (Frantar et al., 2022, arXiv:2210.17323) and, for zeros, SparseGPT (Frantar and Alistarh, 2023,
arXiv:2301.00774).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Of the mean square of inputs, what is added to each: the text is not all that the model will see.
_DAMPING = 0.01

#: Takes a block [num_out, size] whose columns will change as those before them are given up, and
#: the shares of its inputs [size]; returns what column i is to be [num_out], asked of each in turn.
Begin = Callable[[torch.Tensor, torch.Tensor], Callable[[int], torch.Tensor]]


def fit(weight: torch.Tensor, gram: torch.Tensor, block_size: int, begin: Begin) -> None:
    """Call `begin` for each `block_size` inputs of weight [num_out, num_in], and what it returns
    for each input.

    gram [num_in, num_in]: the sum of the inputs' outer products. The difference that giving up
    input i makes to outputs is, at best, the error of its weight over shares[i].
    """
    rest = weight.float().clone()
    share = _shares(gram)
    for first in range(0, weight.shape[1], block_size):
        end = first + block_size
        block, among = rest[:, first:end], share[first:end, first:end]
        errors = torch.empty_like(block)
        column = begin(block, among.diagonal())
        for i in range(block.shape[1]):
            errors[:, i] = (block[:, i] - column(i)) / among[i, i]
            block[:, i:] -= errors[:, i : i + 1] * among[i, i:]
        rest[:, end:] -= errors @ share[first:end, end:]


def _shares(gram: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of `gram`, damped: row i is how the inputs from i on
    make up for an error of i."""
    damped = gram.double()
    diagonal = damped.diagonal()
    # An input that is always zero does not matter.
    diagonal[diagonal == 0] = 1.0
    diagonal += _DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    shares: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return shares.float()
