"""Rotary position embedding in the rotate-half form.

A head vector is split in halves (a, b); with angle t_i = position * inv_freq_i,
    a'_i = a_i cos t_i - b_i sin t_i,    b'_i = b_i cos t_i + a_i sin t_i.
"""

from __future__ import annotations

import torch

from baton_kernels.dispatch import op


def rope_tables(
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    scaling: float | torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [tokens, head_dim / 2] of `dtype`, times `scaling`.

    positions [tokens] int64; inv_freq [tokens, head_dim / 2] or [1, head_dim / 2] float32; scaling:
    one factor, or [1, head_dim / 2] float32. Angles are float32.
    """
    angles = positions[:, None].float() * inv_freq
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


@op
def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [tokens, heads, head_dim] by cos and sin [tokens, head_dim / 2], all of one
    dtype."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.empty_like(x)
    half = first.shape[-1]
    torch.sub(first * cos, second * sin, out=rotated[..., :half])
    torch.add(second * cos, first * sin, out=rotated[..., half:])
    return rotated
