"""The exchange of results between the ranks of a group, and that of a single rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from engine.shard import WHOLE, Shard


class ExchangeFailed(Exception):
    """Another rank of the group has gone. No request is at fault; only a new process can
    continue."""


class Ranks(Protocol):
    """The ranks of one group, as seen by one of them. All ranks call the same methods in the same
    order. Methods raise ExchangeFailed, or wait, if a rank is gone. shard: this rank's number, and
    its part of what the group shares."""

    @property
    def shard(self) -> Shard: ...

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's columns of `whole` [rows, columns]."""
        ...

    def meet(self) -> None:
        """Barrier: returns when all ranks have called it; their earlier writes are then visible."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """part [rows, columns], of equal shape on all ranks -> [rows, size * columns]: all parts,
        by rank.

        A barrier, even with no rows.
        """
        ...

    def gather_first(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        """part [rows, len(shard.part(num_columns))] -> [rows, num_columns] on rank 0. Other ranks
        get their own part back."""
        ...

    def reduce(self, part: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of all ranks' parts [rows, columns], plus a residual of the same shape, rounded
        to the parts' dtype. All ranks get the same bits. NCCL chooses the order of the sum; the
        others take it in float32, by rank, the residual last.

        A barrier, even with no rows.
        """
        ...

    def exchange(self, part: torch.Tensor, num_rows: Sequence[int]) -> torch.Tensor:
        """part [num_rows[rank], columns] -> [sum(num_rows), columns / size]: this rank's columns of
        the rows of all ranks, by rank (an all-to-all)."""
        ...

    def send_rows(self, rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        """An all-to-all of rows. counts: by sender, the number of rows for each rank. rows [number
        that this rank sends, columns], by receiver -> [number for this rank, columns], by
        sender."""
        ...


#: Bytes of a part, from which on ranks of more than two share out a sum's rows instead of each
#: taking the whole sum: they then receive 2 (N - 1) / N parts in place of N - 1, in two exchanges.
SHARED_SUM_BYTES = 64 << 10


def shares_sum(part: torch.Tensor, size: int) -> bool:
    """Whether `size` ranks share out the sum of such parts."""
    return size > 2 and part.nbytes >= SHARED_SUM_BYTES and part.shape[1] % size == 0


def shared_sum(ranks: Ranks, part: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """See Ranks.reduce: each rank sums its columns, and gets the others'."""
    (rows, columns), size = part.shape, ranks.shard.size
    parts = ranks.exchange(part, [rows] * size).view(size, rows, columns // size)
    own = None if residual is None else ranks.own(residual)
    return ranks.gather(sum_of(parts.unbind(), own))


def sum_of(parts: Sequence[torch.Tensor], residual: torch.Tensor | None) -> torch.Tensor:
    """The sum of two or more parts of one shape in float32, in order, the residual last; rounded to
    the parts' dtype."""
    first, second, *others = parts
    total = first.float() + second
    for other in others if residual is None else (*others, residual):
        total += other
    return total.to(first.dtype)


class Alone:
    """Ranks of a model with a single rank."""

    shard = WHOLE

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def meet(self) -> None:
        """See Ranks."""

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather_first(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:  # noqa: ARG002
        return part

    def reduce(self, part: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return part if residual is None else part + residual

    def exchange(self, part: torch.Tensor, num_rows: Sequence[int]) -> torch.Tensor:  # noqa: ARG002
        return part

    def send_rows(self, rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:  # noqa: ARG002
        return rows


class Groups(NamedTuple):
    """The groups that a rank belongs to. tensor: ranks that share each layer. context: ranks that
    share a step's tokens."""

    tensor: Ranks
    context: Ranks


#: Groups of a single rank.
ALONE = Groups(Alone(), Alone())
