"""Beam search by transformers itself, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from baton.types import EarlyStopping, Sampling

EARLY = {
    EarlyStopping.HEURISTIC: False,
    EarlyStopping.ALWAYS: True,
    EarlyStopping.NEVER: "never",
}


def transformers_beams(
    path: Path, prompt: Sequence[int], sampling: Sampling
) -> list[tuple[list[int], float]]:
    """(output without what follows its end, score) of transformers' search."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    beam = sampling.beam
    assert beam is not None
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=beam.width,
        num_return_sequences=beam.num_returned,
        length_penalty=beam.length_penalty,
        early_stopping=EARLY[beam.early_stopping],
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        eos_token_id=sorted(sampling.stop_token_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    # The number of tokens is that of the steps at which a beam was written down.
    lengths = (out.beam_indices >= 0).sum(-1).tolist()
    rows = [row[len(prompt) :].tolist() for row in out.sequences]
    scores = out.sequences_scores.tolist()
    return [(row[:n], score) for row, n, score in zip(rows, lengths, scores, strict=True)]
