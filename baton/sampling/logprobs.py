"""Log probabilities told with samples: the model's own, of logits before any edit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from baton.types import TokenLogprobs

#: Rows worked on at once, which bounds the memory that a long prompt's log probabilities take.
MAX_ROWS = 64


def token_logprobs(
    logits: torch.Tensor, tokens: Mapping[int, int], num_top: Mapping[int, int]
) -> dict[int, TokenLogprobs]:
    """Natural-log probabilities at the rows that `tokens` names, of tokens[row] and of the num_top[row] likeliest.

    logits [rows, vocab] float32, finite.
    """
    told: dict[int, TokenLogprobs] = {}
    for count, rows in _groups(num_top, logits.shape[-1]):
        values = logits[torch.tensor(rows, device=logits.device)].log_softmax(-1)
        chosen = torch.tensor([tokens[row] for row in rows], device=logits.device)
        own = values.gather(1, chosen[:, None])[:, 0].tolist()
        for row, value, top in zip(rows, own, _top(values, count), strict=True):
            told[row] = TokenLogprobs(tokens[row], value, top)
    return told


def likeliest(
    logits: torch.Tensor, edited: torch.Tensor, num_candidates: Mapping[int, int]
) -> dict[int, TokenLogprobs]:
    """The num_candidates[row] likeliest of the tokens that `edited` leaves a row, fewer if it leaves fewer; the first is
    the chosen one. Probabilities are those of the row's whole vocabulary.

    logits, edited [rows, vocab] float32; edited is -inf where a token may not be chosen, and somewhere it is not.
    """
    told: dict[int, TokenLogprobs] = {}
    for count, rows in _groups(num_candidates, logits.shape[-1]):
        index = torch.tensor(rows, device=logits.device)
        values = logits[index].log_softmax(-1)
        values.masked_fill_(edited[index].isneginf(), float("-inf"))
        for row, top in zip(rows, _top(values, count), strict=True):
            allowed = tuple(entry for entry in top if entry[1] > float("-inf"))
            told[row] = TokenLogprobs(*allowed[0], allowed)
    return told


def _groups(counts: Mapping[int, int], vocab_size: int) -> Iterator[tuple[int, list[int]]]:
    """(count, rows) of at most MAX_ROWS. By count, because which of two equals is among a row's best may depend on how
    many are looked for, and no row may depend on others."""
    by_count: dict[int, list[int]] = defaultdict(list)
    for row, count in counts.items():
        by_count[min(count, vocab_size)].append(row)
    for count, rows in by_count.items():
        for first in range(0, len(rows), MAX_ROWS):
            yield count, rows[first : first + MAX_ROWS]


def _top(values: torch.Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """(token id, value) of each row's `count` largest, best first."""
    best = values.topk(count)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [tuple(zip(ids, row, strict=True)) for ids, row in pairs]
