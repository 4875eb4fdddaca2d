"""2:4 sparsity: of each four inputs that follow each other, an output has weights for two at
most."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.quantization.fitting import fit

#: Inputs that are fitted together; those after them later, all at once.
_BLOCK = 64


def prune(weight: torch.Tensor) -> torch.Tensor:
    """weight [num_out, num_in], num_in a multiple of 4, with zeros for the two smaller of each
    four. Of equals the first stay."""
    if weight.shape[1] % 4:
        raise ValueError(f"{weight.shape[1]} inputs are no multiple of 4")
    return torch.where(_largest_two(weight.float().abs()), weight, torch.zeros_like(weight))


def prune_by_inputs(weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """As prune, so that outputs change little for inputs such as those of `gram`: see
    engine.quantization.fitting."""
    pruned = torch.empty(weight.shape)
    done = 0

    def begin(block: torch.Tensor, shares: torch.Tensor) -> Callable[[int], torch.Tensor]:
        nonlocal done
        first, done = done, done + block.shape[1]
        is_kept = torch.zeros_like(block, dtype=torch.bool)

        def column(i: int) -> torch.Tensor:
            if i % 4 == 0:
                four = slice(i, i + 4)
                is_kept[:, four] = _largest_two((block[:, four] / shares[four]).abs())
            pruned[:, first + i] = kept = block[:, i] * is_kept[:, i]
            return kept

        return column

    fit(weight, gram, _BLOCK, begin)
    return pruned.to(weight.dtype)


def _largest_two(sizes: torch.Tensor) -> torch.Tensor:
    """Of each four of [num_out, num_in] whether it is one of the two largest."""
    order = sizes.view(len(sizes), -1, 4).argsort(dim=-1, descending=True, stable=True)
    is_kept = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order[..., :2], True)
    return is_kept.view(sizes.shape)
