"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * weight, over the last
dimension."""

from __future__ import annotations

import torch

from baton_kernels.dispatch import op


@op
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., dim] and weight [dim] of one dtype -> [..., dim].

    The mean is taken in float32; the quotient is rounded to x's dtype before the weight is applied,
    as the models' training code does.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
