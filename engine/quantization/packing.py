"""Packs small numbers into int32 words, the first in the lowest bits."""

from __future__ import annotations

import torch


def pack(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack levels [rows, columns] uint8 in [0, 2^bits) -> [rows, ceil(columns * bits / 32)]
    int32."""
    per_word = 32 // bits
    rows, columns = levels.shape
    padded = torch.nn.functional.pad(levels, (0, -columns % per_word))
    shifts = torch.arange(per_word, dtype=torch.int64) * bits
    words = (padded.view(rows, -1, per_word).long() << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def unpack(words: torch.Tensor, bits: int, columns: int | None = None) -> torch.Tensor:
    """Inverse of pack: [rows, words] int32 -> [rows, columns or all] uint8."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    levels = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return levels.flatten(1)[:, :columns].to(torch.uint8)
