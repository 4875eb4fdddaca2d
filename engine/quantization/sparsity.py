"""2:4 sparsity: each output has at most two nonzero weights in each four consecutive inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.quantization.fitting import fit

#: Inputs that are fitted together; later inputs are updated once per block.
_BLOCK = 64


def prune(weight: torch.Tensor) -> torch.Tensor:
    """Zero the two smaller of each four weights [num_out, num_in]; num_in is a multiple of 4. On
    ties the earlier ones stay."""
    if weight.shape[1] % 4:
        raise ValueError(f"{weight.shape[1]} inputs are no multiple of 4")
    return torch.where(_largest_two(weight.float().abs()), weight, torch.zeros_like(weight))


def prune_by_inputs(weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """As prune, but minimise the change of outputs for inputs distributed like those of `gram`: see
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
    """Mask of the two largest of each four of [num_out, num_in]."""
    order = sizes.view(len(sizes), -1, 4).argsort(dim=-1, descending=True, stable=True)
    is_kept = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order[..., :2], True)
    return is_kept.view(sizes.shape)
