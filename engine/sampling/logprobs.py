"""Log probabilities reported with samples: the model's own, from logits before any edit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TypeVar

import torch

from baton.types import TokenLogprobs
from baton_kernels.host_copy import HostCopy, to_device

#: Maximum rows processed at once: bounds the memory for a long prompt's log probabilities.
MAX_ROWS = 64

WantedT = TypeVar("WantedT", int, "Wanted")


@dataclass(frozen=True, slots=True)
class ChosenLogprobs:
    """Log probabilities in transfer from the device: at `rows`, those of each row's token [rows],
    the likeliest ones, or those asked for, and the ranks of the tokens [rows], if wanted."""

    rows: tuple[int, ...]
    own: HostCopy
    top: TopTokens
    ranks: HostCopy | None = None

    def reported(self, chosen: Sequence[int]) -> dict[int, TokenLogprobs]:
        """Log probabilities by row. chosen: the tokens of all rows, including rows without log
        probabilities."""
        own = self.own.wait().tolist()
        ranks = self.ranks.wait().tolist() if self.ranks else repeat(0, len(own))
        return {
            row: TokenLogprobs(chosen[row], value, top, rank)
            for row, value, top, rank in zip(self.rows, own, self.top.pairs(), ranks, strict=True)
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


#: Number of the likeliest tokens to report, or the tokens to report.
Wanted = int | tuple[int, ...]


def token_logprobs(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    wanted: Mapping[int, Wanted],
    *,
    has_ranks: bool = False,
) -> list[ChosenLogprobs]:
    """Natural-log probabilities at the rows in `wanted`: of chosen[row] and of other tokens.

    logits [rows, vocab] float32, chosen [rows] int64. has_ranks: whether to report chosen's ranks.
    """
    found = []
    for others, rows in _groups(wanted):
        index = to_device(torch.tensor(rows), logits.device)
        values = logits[index].log_softmax(-1)
        own = values.gather(1, chosen[index][:, None])
        ranks = HostCopy((values >= own).sum(-1)) if has_ranks else None
        top = _top(values, others) if isinstance(others, int) else _named(values, others)
        found.append(ChosenLogprobs(tuple(rows), HostCopy(own[:, 0]), top, ranks))
    return found


def likeliest(
    logits: torch.Tensor, edited: torch.Tensor, num_candidates: Mapping[int, int]
) -> list[LikeliestLogprobs]:
    """The num_candidates[row] likeliest tokens that `edited` allows in a row, or fewer if fewer are
    allowed; the first is the chosen one. Probabilities are over the whole vocabulary.

    logits, edited [rows, vocab] float32; edited is -inf where a token is forbidden.
    """
    found = []
    for count, rows in _groups(num_candidates):
        index = to_device(torch.tensor(rows), logits.device)
        values = logits[index].log_softmax(-1)
        values.masked_fill_(edited[index].isneginf(), float("-inf"))
        found.append(LikeliestLogprobs(tuple(rows), _top(values, count)))
    return found


def _groups(wanted: Mapping[int, WantedT]) -> Iterator[tuple[WantedT, list[int]]]:
    """Yield (what is wanted, rows) with at most MAX_ROWS rows. Grouped by count, because top-k may
    break ties differently for different counts, and a row must not depend on others."""
    by_wanted: dict[WantedT, list[int]] = defaultdict(list)
    for row, each in wanted.items():
        by_wanted[each].append(row)
    for each, rows in by_wanted.items():
        for first in range(0, len(rows), MAX_ROWS):
            yield each, rows[first : first + MAX_ROWS]


def _top(values: torch.Tensor, count: int) -> TopTokens:
    best = values.topk(min(count, values.shape[-1]))
    return TopTokens(HostCopy(best.indices), HostCopy(best.values))


def _named(values: torch.Tensor, token_ids: Sequence[int]) -> TopTokens:
    """The values of these tokens, best first."""
    columns = to_device(torch.tensor(token_ids), values.device)
    best = values[:, columns].sort(dim=-1, descending=True, stable=True)
    return TopTokens(HostCopy(columns[best.indices]), HostCopy(best.values))
