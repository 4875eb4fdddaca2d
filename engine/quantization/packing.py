"""Several small numbers in one int32, the first in the lowest bits."""

from __future__ import annotations

import torch


def unpack(words: torch.Tensor, bits: int, columns: int | None = None) -> torch.Tensor:
    """[rows, words] int32 -> [rows, columns or all] uint8."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    levels = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return levels.flatten(1)[:, :columns].to(torch.uint8)
