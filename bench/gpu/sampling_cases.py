"""Kernels that filter logits and draw tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from baton_kernels import sampling as sampling_twins
from baton_kernels.gpu import sampling
from bench.gpu.case import Case, Sizes, Trial, randn, share_unequal


def _draw(generator: torch.Generator, sizes: Sizes) -> Trial:
    logits = randn(generator, 64, sizes.vocab_size) * 2
    keys = torch.randint(-(2**31), 2**31, (64, 2), generator=generator, device=generator.device).to(
        torch.int32
    )
    return Trial(
        lambda: sampling.gumbel_argmax(logits, keys),
        lambda got: share_unequal(got, sampling_twins.gumbel_argmax.twin(logits, keys)),
        # Tolerance: differs only where two tokens are closer than a few units in the last place.
        1 / 64,
    )


def _keep(
    kernel: Callable[[torch.Tensor, torch.Tensor], None],
    twin: Callable[[torch.Tensor, torch.Tensor], None],
    value: float,
    generator: torch.Generator,
    sizes: Sizes,
) -> Trial:
    """value: top_k if it is 1 or more, else top_p."""
    logits = randn(generator, 4, sizes.vocab_size) * 3
    dtype = torch.int64 if value >= 1 else torch.float32
    argument = torch.full((4,), value, dtype=dtype, device=logits.device)
    got = logits.clone()

    def error(_got: None) -> float:
        wanted = logits.clone()
        twin(wanted, argument)
        return share_unequal(got, wanted) * sizes.vocab_size

    # Tolerated differing tokens per row: top_p sums in another order.
    return Trial(lambda: kernel(got, argument), error, 0.0 if value >= 1 else 1.0)


def sampling_cases() -> Sequence[Case]:
    """See above."""
    keep_k = partial(_keep, sampling.keep_top_k, sampling_twins.keep_top_k.twin, 50)
    keep_p = partial(_keep, sampling.keep_top_p, sampling_twins.keep_top_p.twin, 0.9)
    return (
        Case("gumbel_argmax", _draw),
        Case("keep_top_k", keep_k),
        Case("keep_top_p", keep_p),
    )
