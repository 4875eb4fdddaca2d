"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * weight, over the last
dimension."""

from __future__ import annotations

import torch

from baton_kernels.dispatch import op


@op
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., dim], weight [dim] of x's dtype or float32 -> [..., dim].

    The mean is float32. The quotient is rounded to x's dtype before a weight of that dtype is
    applied, and after a float32 weight is, as in the models' training code.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)
