"""Argmax and draws in native code, in one or a few passes over the logits; all other operations run
as torch twins."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

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


def draw_rows(
    logits: torch.Tensor, draws: Sequence[twin.Draw]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the twin. The noise agrees with the twin's to a few units in the last place."""
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        return twin.draw_rows.twin(logits, draws)
    num_rows, vocab_size = logits.shape
    chosen = torch.empty(num_rows, dtype=torch.int64)
    verdicts = torch.empty(num_rows, dtype=torch.int64)
    settings: list[array[float] | array[int]] = [
        array("f", [draw.temperature for draw in draws]),
        array("q", [draw.top_k if draw.top_k < vocab_size else 0 for draw in draws]),
        array("f", [draw.top_p for draw in draws]),
        array("f", [draw.min_p for draw in draws]),
        array("i", chain.from_iterable(draw.key for draw in draws)),
    ]
    loaded().baton_draw_rows(
        *(logits.data_ptr(), num_rows, vocab_size),
        *(values.buffer_info()[0] for values in settings),
        *(chosen.data_ptr(), verdicts.data_ptr(), torch.get_num_threads()),
    )
    return chosen, verdicts
