"""Log probabilities reported with samples: the model's own, of logits before any edit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.types import TokenLogprobs
from baton_kernels.host_copy import HostCopy, to_device

#: Rows worked on at once, which bounds the memory that a long prompt's log probabilities take.
MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class ChosenLogprobs:
    """On their way from the device: at `rows`, the log probability of the row's token [rows], and
    the likeliest ones."""

    rows: tuple[int, ...]
    own: HostCopy
    top: TopTokens

    def reported(self, chosen: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By row. chosen: the token of each row, also of others."""
        own = self.own.wait().tolist()
        return {
            row: TokenLogprobs(chosen[row], value, top)
            for row, value, top in zip(self.rows, own, self.top.pairs(), strict=True)
        }


@dataclass(frozen=True, slots=True)
class LikeliestLogprobs:
    """On their way from the device: at `rows`, the likeliest tokens, of which the first is the one
    that is chosen."""

    rows: tuple[int, ...]
    top: TopTokens

    def reported(self, _chosen: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By row. No row is without a token that it may choose."""
        found: dict[int, TokenLogprobs] = {}
        for row, top in zip(self.rows, self.top.pairs(), strict=True):
            allowed = tuple(entry for entry in top if entry[1] > float("-inf"))
            found[row] = TokenLogprobs(*allowed[0], allowed)
        return found


@dataclass(frozen=True, slots=True)
class TopTokens:
    """ids, values [rows, count], best first."""

    ids: HostCopy
    values: HostCopy

    def pairs(self) -> list[tuple[tuple[int, float], ...]]:
        """(token id, value) of each row's."""
        found = zip(self.ids.wait().tolist(), self.values.wait().tolist(), strict=True)
        return [tuple(zip(ids, values, strict=True)) for ids, values in found]


def token_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: Mapping[int, int]
) -> list[ChosenLogprobs]:
    """Natural-log probabilities at the rows that `num_top` names, of chosen[row] and of the
    num_top[row] likeliest.

    logits [rows, vocab] float32, chosen [rows] int64.
    """
    found = []
    for count, rows in _groups(num_top, logits.shape[-1]):
        index = to_device(torch.tensor(rows), logits.device)
        values = logits[index].log_softmax(-1)
        own = values.gather(1, chosen[index][:, None])[:, 0]
        found.append(ChosenLogprobs(tuple(rows), HostCopy(own), _top(values, count)))
    return found


def likeliest(
    logits: torch.Tensor, edited: torch.Tensor, num_candidates: Mapping[int, int]
) -> list[LikeliestLogprobs]:
    """The num_candidates[row] likeliest of the tokens that `edited` leaves a row, fewer if it
    leaves fewer; the first is the chosen one. Probabilities are those of the row's whole
    vocabulary.

    logits, edited [rows, vocab] float32; edited is -inf where a token may not be chosen.
    """
    found = []
    for count, rows in _groups(num_candidates, logits.shape[-1]):
        index = to_device(torch.tensor(rows), logits.device)
        values = logits[index].log_softmax(-1)
        values.masked_fill_(edited[index].isneginf(), float("-inf"))
        found.append(LikeliestLogprobs(tuple(rows), _top(values, count)))
    return found


def _groups(counts: Mapping[int, int], vocab_size: int) -> Iterator[tuple[int, list[int]]]:
    """(count, rows) of at most MAX_ROWS. By count, because which of two equals is among a row's
    best may depend on how many are looked for, and no row may depend on others."""
    by_count: dict[int, list[int]] = defaultdict(list)
    for row, count in counts.items():
        by_count[min(count, vocab_size)].append(row)
    for count, rows in by_count.items():
        for first in range(0, len(rows), MAX_ROWS):
            yield count, rows[first : first + MAX_ROWS]


def _top(values: torch.Tensor, count: int) -> TopTokens:
    best = values.topk(count)
    return TopTokens(HostCopy(best.indices), HostCopy(best.values))
