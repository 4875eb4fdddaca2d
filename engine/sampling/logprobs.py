"""Log probabilities reported with samples: the model's own, from logits before any edit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.types import TokenLogprobs
from baton_kernels.host_copy import HostCopy, to_device

#: Maximum rows processed at once: bounds the memory for a long prompt's log probabilities.
MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class ChosenLogprobs:
    """Log probabilities in transfer from the device: at `rows`, those of each row's token [rows],
    and the likeliest ones."""

    rows: tuple[int, ...]
    own: HostCopy
    top: TopTokens

    def reported(self, chosen: Sequence[int]) -> dict[int, TokenLogprobs]:
        """Log probabilities by row. chosen: the tokens of all rows, including rows without log
        probabilities."""
        own = self.own.wait().tolist()
        return {
            row: TokenLogprobs(chosen[row], value, top)
            for row, value, top in zip(self.rows, own, self.top.pairs(), strict=True)
        }


@dataclass(frozen=True, slots=True)
class LikeliestLogprobs:
    """Likeliest tokens in transfer from the device, at `rows`; the first of each row is the chosen
    one."""

    rows: tuple[int, ...]
    top: TopTokens

    def reported(self, _chosen: Sequence[int]) -> dict[int, TokenLogprobs]:
        """Log probabilities by row; each row has at least one allowed token."""
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
        """(token id, value) pairs per row."""
        found = zip(self.ids.wait().tolist(), self.values.wait().tolist(), strict=True)
        return [tuple(zip(ids, values, strict=True)) for ids, values in found]


def token_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: Mapping[int, int]
) -> list[ChosenLogprobs]:
    """Natural-log probabilities at the rows in `num_top`: of chosen[row] and of the num_top[row]
    likeliest tokens.

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
    """The num_candidates[row] likeliest tokens that `edited` allows in a row, or fewer if fewer are
    allowed; the first is the chosen one. Probabilities are over the whole vocabulary.

    logits, edited [rows, vocab] float32; edited is -inf where a token is forbidden.
    """
    found = []
    for count, rows in _groups(num_candidates, logits.shape[-1]):
        index = to_device(torch.tensor(rows), logits.device)
        values = logits[index].log_softmax(-1)
        values.masked_fill_(edited[index].isneginf(), float("-inf"))
        found.append(LikeliestLogprobs(tuple(rows), _top(values, count)))
    return found


def _groups(counts: Mapping[int, int], vocab_size: int) -> Iterator[tuple[int, list[int]]]:
    """Yield (count, rows) with at most MAX_ROWS rows. Grouped by count, because top-k may break
    ties differently for different counts, and a row must not depend on others."""
    by_count: dict[int, list[int]] = defaultdict(list)
    for row, count in counts.items():
        by_count[min(count, vocab_size)].append(row)
    for count, rows in by_count.items():
        for first in range(0, len(rows), MAX_ROWS):
            yield count, rows[first : first + MAX_ROWS]


def _top(values: torch.Tensor, count: int) -> TopTokens:
    best = values.topk(count)
    return TopTokens(HostCopy(best.indices), HostCopy(best.values))
