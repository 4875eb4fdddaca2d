"""Epilogue of a torch matrix product, for devices without a kernel that fuses it."""

from __future__ import annotations

import torch


def finish(
    y: torch.Tensor, residual: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """Return y (+ residual), cast to out_dtype if given."""
    if residual is not None:
        y = y + residual
    return y if out_dtype is None else y.to(out_dtype)
