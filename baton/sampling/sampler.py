"""Turn sample rows and their logits into samples.

Order, as in transformers: repetition penalty (prompt and output), presence and frequency (output), logit_bias, min_tokens,
temperature, top_k, top_p, min_p, draw. A row takes part only in the steps that it asks for: its result does not depend
on what other rows ask for. Log probabilities are those of the model, before all of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from baton.engine.interface import SampleRow
from baton.sampling.keys import draw_key
from baton.types import Sample, Sampling, TokenLogprobs
from baton_kernels.sampling import (
    add_bias,
    gumbel_argmax,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize,
)


def broken_rows(logits: torch.Tensor) -> list[int]:
    """Indices of rows of [rows, vocab] that hold a NaN or an infinity."""
    # A sum is finite exactly if its float32 terms are, but for overflow far beyond any logit.
    return torch.nonzero(~torch.isfinite(logits.sum(-1))).flatten().tolist()


def names_unknown_token(sampling: Sampling, vocab_size: int) -> bool:
    """Whether a setting names a token id outside the vocabulary."""
    ids: Iterable[int] = (*sampling.logit_bias, *sampling.stop_token_ids)
    return any(not 0 <= token < vocab_size for token in ids)


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sample]:
    """One sample per row of finite logits [rows, vocab] float32, which are not changed."""
    logprobs = _logprobs(logits, rows)
    edited = _edit(logits, rows)
    drawn = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
    chosen = _draw(edited, rows, drawn) if drawn else edited.argmax(-1)
    return _samples(chosen.tolist(), logits, rows, logprobs)


def _indices(rows: Sequence[SampleRow], wanted: Callable[[Sampling], bool]) -> list[int]:
    return [i for i, row in enumerate(rows) if wanted(row.sampling)]


def _edit(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Logits after penalties, bias and min_tokens: a copy where any row has one."""
    penalized = _indices(rows, lambda s: s.has_penalties)
    biased = _bias_entries(rows)
    if not penalized and not biased:
        return logits
    edited = logits.clone()
    device = logits.device
    if penalized:
        penalize(edited, *_penalty_entries(rows, penalized, device))
    if biased:
        at, tokens, bias = zip(*biased, strict=True)
        add_bias(
            edited,
            torch.tensor(at, device=device),
            torch.tensor(tokens, device=device),
            torch.tensor(bias, dtype=torch.float32, device=device),
        )
    return edited


def _penalty_entries(
    rows: Sequence[SampleRow], penalized: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """rows, tokens, output counts and the three penalties, [entries] each: one entry per distinct token of a row."""
    at: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    settings: list[tuple[float, float, float]] = []
    for index in penalized:
        row = rows[index]
        output = Counter(row.token_ids[row.num_prompt_tokens :])
        seen = set(row.token_ids) if row.sampling.repetition_penalty != 1.0 else set(output)
        at += [index] * len(seen)
        tokens += seen
        counts += [output[token] for token in seen]
        s = row.sampling
        settings += [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty)] * len(seen)
    columns = torch.tensor(settings, dtype=torch.float32, device=device).reshape(-1, 3)
    return (
        torch.tensor(at, dtype=torch.int64, device=device),
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(counts, dtype=torch.float32, device=device),
        *columns.unbind(1),
    )


def _bias_entries(rows: Sequence[SampleRow]) -> list[tuple[int, int, float]]:
    """(row, token, bias): logit_bias, and -inf for stop tokens of rows whose next token may not be the last."""
    entries = []
    for index, row in enumerate(rows):
        bias = row.sampling.logit_bias
        masked = row.sampling.stop_token_ids if _too_short(row) else frozenset()
        entries += [(index, token, bias[token]) for token in bias if token not in masked]
        entries += [(index, token, float("-inf")) for token in masked]
    return entries


def _too_short(row: SampleRow) -> bool:
    return row.num_output_tokens + 1 < row.sampling.min_tokens


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


def _logprobs(logits: torch.Tensor, rows: Sequence[SampleRow]) -> dict[int, torch.Tensor]:
    """Log probabilities [vocab] of the rows that report them."""
    wanted = _indices(rows, lambda s: s.logprobs >= 0)
    if not wanted:
        return {}
    index = torch.tensor(wanted, device=logits.device)
    return dict(zip(wanted, logits[index].log_softmax(-1), strict=True))


def _samples(
    chosen: Sequence[int],
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    logprobs: dict[int, torch.Tensor],
) -> list[Sample]:
    samples = []
    for index, (token, row) in enumerate(zip(chosen, rows, strict=True)):
        if index not in logprobs:
            samples.append(Sample(token))
            continue
        values = logprobs[index]
        count = min(row.sampling.logprobs, logits.shape[-1])
        best = values.topk(count)
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        samples.append(Sample(token, TokenLogprobs(token, float(values[token]), top)))
    return samples
