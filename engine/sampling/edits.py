"""Edits of logits that requests ask for, before a token is chosen.

Order, as in transformers: logit_bias, repetition penalty (prompt and output), presence and
frequency penalty (output), bad words (in prompt and output), min_tokens, allowed tokens; the last
overrides the two before. A row takes part only in the edits that it asks for, so its result does
not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from baton.types import Sampling
from baton_kernels.host_copy import to_device
from baton_kernels.sampling import add_bias, forbid, penalize
from engine.interface import SampleRow
from engine.sampling.restrictions import allowed_mask, banned_tokens, forbidden_by
from engine.token_counts import TokenCounts


def names_unknown_token(sampling: Sampling, vocab_size: int) -> bool:
    """Whether a setting has a token id outside the vocabulary."""
    ids: Iterable[int] = (
        *sampling.logit_bias,
        *sampling.stop_token_ids,
        *sampling.allowed_token_ids,
        *sampling.logprob_token_ids,
        *(token for word in sampling.bad_words for token in word),
    )
    return any(not 0 <= token < vocab_size for token in ids)


def asks_for_edits(row: SampleRow) -> bool:
    """Whether a row's request has settings that may edit its logits."""
    sampling = row.sampling
    return bool(
        row.allowed is not None
        or sampling.allowed_token_ids
        or sampling.logit_bias
        or sampling.bad_words
        or row.num_output_tokens < sampling.min_tokens
        or sampling.has_penalties
    )


def edit(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Logits [rows, vocab] float32 after all edits, -inf for forbidden tokens. Copies if any row
    has an edit."""
    # Most steps have no edits: return early without a copy.
    if not any(map(asks_for_edits, rows)):
        return logits
    penalized = [i for i, row in enumerate(rows) if row.sampling.has_penalties]
    biased = [
        (i, token, bias)
        for i, row in enumerate(rows)
        for token, bias in row.sampling.logit_bias.items()
    ]
    banned = [
        (i, token, float("-inf")) for i, row in enumerate(rows) for token in banned_tokens(row)
    ]
    masks = {i: mask for i, row in enumerate(rows) if (mask := allowed_mask(row)) is not None}
    if not (penalized or biased or banned or masks):
        return logits
    edited = logits.clone()
    if biased:
        _add(edited, biased)
    if penalized:
        penalize(edited, *_penalty_entries(rows, penalized, logits.device))
    if banned:
        _add(edited, banned)
    if masks:
        _forbid(edited, masks)
    return edited


def _add(logits: torch.Tensor, entries: Sequence[tuple[int, int, float]]) -> None:
    """Add (row, token, bias) entries, without repeats, in place."""
    at, tokens, bias = zip(*entries, strict=True)
    device = logits.device
    add_bias(
        logits,
        to_device(torch.tensor(at), device),
        to_device(torch.tensor(tokens), device),
        to_device(torch.tensor(bias, dtype=torch.float32), device),
    )


def _penalty_entries(
    rows: Sequence[SampleRow], penalized: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """rows, tokens, output counts and the three penalties, [entries] each: one entry per distinct
    token of a row."""
    at: list[NDArray[np.int64]] = []
    tokens: list[NDArray[np.int64]] = []
    outputs: list[NDArray[np.float32]] = []
    settings: list[NDArray[np.float32]] = []
    for index in penalized:
        row = rows[index]
        s = row.sampling
        penalties = s.repetition_penalty, s.presence_penalty, s.frequency_penalty
        base = row.counts or TokenCounts(row.num_prompt_tokens)
        with base.beyond(row.token_ids) as counts:
            num_entries = len(counts.tokens)
            at.append(np.full(num_entries, index))
            tokens.append(counts.tokens.copy())
            outputs.append(counts.outputs.copy())
            settings.append(np.tile(np.array(penalties, np.float32), (num_entries, 1)))
    return (
        *(to_device(torch.from_numpy(np.concatenate(c)), device) for c in (at, tokens, outputs)),
        *to_device(torch.from_numpy(np.concatenate(settings)), device).unbind(1),
    )


def _forbid(logits: torch.Tensor, masks: Mapping[int, bytes]) -> None:
    """Apply masks of allowed tokens, by row, in place."""
    forbidden = torch.from_numpy(forbidden_by([*masks.values()], logits.shape[-1]))
    on_device = to_device(forbidden, logits.device)
    if len(masks) == len(logits):
        forbid(logits, on_device)
        return
    index = to_device(torch.tensor([*masks]), logits.device)
    part = logits[index]
    forbid(part, on_device)
    logits.index_copy_(0, index, part)
