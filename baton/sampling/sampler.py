"""Turn sample rows and their logits into samples.

Order, as in transformers: the edits of baton.sampling.edits, temperature, top_k, top_p, min_p, draw. A row takes part only
in the steps that it asks for: its result does not depend on what other rows ask for. Log probabilities are those of the
model, before all of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from baton.engine.interface import SampleRow
from baton.sampling.beam_search import num_candidates
from baton.sampling.edits import edit
from baton.sampling.keys import draw_key
from baton.sampling.logprobs import likeliest, token_logprobs
from baton.types import Sample, Sampling, TokenLogprobs
from baton_kernels.sampling import gumbel_argmax, keep_min_p, keep_top_k, keep_top_p


class NothingAllowedError(ValueError):
    """No token may be chosen at some rows: what their requests forbid and demand leaves none."""

    def __init__(self, rows: Sequence[int]) -> None:
        """rows: indices of the rows."""
        super().__init__("no token is left to choose")
        self.rows = tuple(rows)


def broken_rows(logits: torch.Tensor) -> list[int]:
    """Indices of rows of [rows, vocab] that hold a NaN or an infinity."""
    # A sum is finite exactly if its float32 terms are, but for overflow far beyond any logit.
    if math.isfinite(logits.sum().item()):
        return []
    return torch.nonzero(~torch.isfinite(logits.sum(-1))).flatten().tolist()


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sample]:
    """One sample per row of finite logits [rows, vocab] float32, which are not changed.

    Either all rows score a token or none does. Raises NothingAllowedError.
    """
    if rows and rows[0].scored_token_id is not None:
        return _score(logits, rows)
    edited = edit(logits, rows)
    drawn = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
    chosen = _draw(edited, rows, drawn) if drawn else edited.argmax(-1)
    if edited is not logits:
        _check(edited, chosen)
    tokens = dict(enumerate(chosen.tolist()))
    told = _told(logits, edited, rows, tokens)
    return [_sample(token, told.get(i)) for i, token in tokens.items()]


def _score(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sample]:
    """Each row's own token, with its log probabilities."""
    tokens = {i: r.scored_token_id for i, r in enumerate(rows) if r.scored_token_id is not None}
    num_top = {i: rows[i].sampling.prompt_logprobs for i in tokens}
    told = token_logprobs(logits, tokens, num_top)
    return [Sample(token, told[i]) for i, token in tokens.items()]


def _told(
    logits: torch.Tensor, edited: torch.Tensor, rows: Sequence[SampleRow], tokens: dict[int, int]
) -> dict[int, TokenLogprobs]:
    """Log probabilities of the rows that ask for some, and what beams may go on with."""
    beams = {
        i: num_candidates(r.sampling) for i, r in enumerate(rows) if r.sampling.beam is not None
    }
    wanted = {
        i: r.sampling.logprobs
        for i, r in enumerate(rows)
        if r.sampling.logprobs >= 0 and i not in beams
    }
    told = token_logprobs(logits, {i: tokens[i] for i in wanted}, wanted)
    return told | likeliest(logits, edited, beams)


def _sample(token_id: int, told: TokenLogprobs | None) -> Sample:
    return Sample(told.token_id if told else token_id, told)


def _check(edited: torch.Tensor, chosen: torch.Tensor) -> None:
    """A row that has chosen a forbidden token had no other."""
    is_dead = edited.gather(1, chosen[:, None])[:, 0].isneginf()
    if dead := torch.nonzero(is_dead).flatten().tolist():
        raise NothingAllowedError(dead)


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow], drawn: Sequence[int]) -> torch.Tensor:
    """Chosen ids [rows]: drawn ones at `drawn`, the likeliest elsewhere."""
    device = logits.device
    settings = [rows[i].sampling for i in drawn]
    temperature = torch.tensor([s.temperature for s in settings], device=device)
    keys = torch.tensor(
        [draw_key(rows[i].sampling.seed, rows[i].num_output_tokens, rows[i].choice) for i in drawn],
        dtype=torch.int32,
        device=device,
    )
    index = torch.tensor(drawn, device=device)
    # Relative to the likeliest, so that no temperature, however low, makes an infinity of it.
    part = logits[index]
    scaled = (part - part.amax(-1, keepdim=True)) / temperature[:, None]
    _filter(scaled, settings)
    picked = gumbel_argmax(scaled, keys)
    if len(drawn) == len(rows):
        return picked
    return logits.argmax(-1).index_copy_(0, index, picked)


def _filter(scaled: torch.Tensor, settings: Sequence[Sampling]) -> None:
    """Filters, in place, each on the rows that ask for it. scaled [len(settings), vocab]."""
    vocab_size = scaled.shape[-1]
    _apply(
        scaled,
        {i: s.top_k for i, s in enumerate(settings) if 0 < s.top_k < vocab_size},
        torch.int64,
        keep_top_k,
    )
    _apply(
        scaled,
        {i: s.top_p for i, s in enumerate(settings) if s.top_p < 1.0},
        torch.float32,
        keep_top_p,
    )
    _apply(
        scaled,
        {i: s.min_p for i, s in enumerate(settings) if s.min_p > 0.0},
        torch.float32,
        keep_min_p,
    )


def _apply(
    scaled: torch.Tensor,
    values: dict[int, int] | dict[int, float],
    dtype: torch.dtype,
    keep: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Run one filter on the rows that `values` names."""
    if not values:
        return
    argument = torch.tensor(list(values.values()), dtype=dtype, device=scaled.device)
    if len(values) == scaled.shape[0]:
        keep(scaled, argument)
        return
    index = torch.tensor(list(values), device=scaled.device)
    part = scaled[index]
    keep(part, argument)
    scaled.index_copy_(0, index, part)
