"""The likeliest tokens, natively, in one pass over the logits; the other operations are their
twins."""

from __future__ import annotations

import torch

from baton_kernels import sampling as twin
from baton_kernels.cpu.library import loaded


def checked_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the twin."""
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        return twin.checked_argmax.twin(logits)
    num_rows, vocab_size = logits.shape
    chosen = torch.empty(num_rows, dtype=torch.int64)
    verdicts = torch.empty(num_rows, dtype=torch.int64)
    loaded().baton_checked_argmax(
        *(logits.data_ptr(), num_rows, vocab_size),
        *(chosen.data_ptr(), verdicts.data_ptr(), torch.get_num_threads()),
    )
    return chosen, verdicts
