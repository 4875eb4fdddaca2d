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

    def exchange(self, part: torch.Tensor, num_rows: Sequence[int]) -> torch.Tensor:
        """part [num_rows[rank], columns] -> [sum(num_rows), columns / size]: this rank's columns of
        the rows of all ranks, by rank (an all-to-all)."""
        ...


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

    def exchange(self, part: torch.Tensor, num_rows: Sequence[int]) -> torch.Tensor:  # noqa: ARG002
        return part


class Groups(NamedTuple):
    """The groups that a rank belongs to. tensor: ranks that share each layer. context: ranks that
    share a step's tokens and have one KV pool."""

    tensor: Ranks
    context: Ranks


#: Groups of a single rank.
ALONE = Groups(Alone(), Alone())
