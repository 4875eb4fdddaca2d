"""baton_kernels.word_sum in native code. Runs on the calling thread, without the GIL."""

from __future__ import annotations

import torch

from baton_kernels import word_sum as twin
from baton_kernels.cpu.library import loaded


def word_sum(words: torch.Tensor, key: int, first_word: int = 0) -> torch.Tensor:
    """See the twin."""
    if not words.is_contiguous():
        return twin.word_sum.twin(words, key, first_word)
    total = torch.empty((), dtype=torch.int64)
    first_key = (key + first_word * twin.STEP) & twin.MASK
    loaded().baton_word_sum(words.data_ptr(), len(words), first_key, total.data_ptr())
    return total
