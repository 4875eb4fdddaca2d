"""What rank 0 asks of the other ranks of its engine, and the engine that has none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from baton.types import KvLayout
from engine.interface import Batch
from engine.kv.interface import KvPool
from engine.kv.tensors.paged import GroupedTensorPool, TorchKvPool, host_pool
from engine.shard import Alone, Ranks


class TensorPool(KvPool, Protocol):
    """A KV pool over tensors. tensor, scales: what this process's forward reads and writes of it,
    as TorchKvPool's."""

    tensor: torch.Tensor
    scales: torch.Tensor | None


class Followers(Protocol):
    """Started with the engine, given each command just before rank 0 follows it, ended with it.

    The contexts of `step` and `logits` are those of rank 0's own part. An exception in one of them
    leaves the ranks apart for good, so that nothing but an end of the process can follow.
    """

    @property
    def ranks(self) -> Ranks: ...

    def wait_ready(self, digest: str) -> None:
        """Return when all have loaded. digest: of the checkpoint as rank 0 read it. Raises
        StartupError."""
        ...

    def make_pool(
        self, layout: KvLayout, num_blocks: int, num_window_slots: int, device: torch.device
    ) -> TensorPool:
        """The blocks of all ranks, `layout` being that of the whole model. num_window_slots: 0
        where blocks have the KV of all layers, see GroupedKvPool."""
        ...

    def step(
        self, batch: Batch, tables: Sequence[Sequence[int]], *, is_told: bool
    ) -> AbstractContextManager[None]:
        """A forward, and whether it has a `layers_done`. tables: see WindowedStep."""
        ...

    def logits(self, rows: Sequence[int]) -> AbstractContextManager[None]:
        """Logits of these rows of the last forward's states."""
        ...

    def close(self) -> None:
        """End them. May be called again."""
        ...


class NoFollowers:
    """Of an engine of one rank."""

    ranks = Alone()

    def wait_ready(self, digest: str) -> None:
        """See Followers."""

    def make_pool(
        self, layout: KvLayout, num_blocks: int, num_window_slots: int, device: torch.device
    ) -> TensorPool:
        """See Followers."""
        if num_window_slots:
            return GroupedTensorPool(layout, num_blocks, num_window_slots, host_pool)
        return TorchKvPool(layout, num_blocks, device)

    def step(
        self,
        batch: Batch,  # noqa: ARG002
        tables: Sequence[Sequence[int]],  # noqa: ARG002
        *,
        is_told: bool,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """See Followers."""
        return nullcontext()

    def logits(self, rows: Sequence[int]) -> AbstractContextManager[None]:  # noqa: ARG002
        """See Followers."""
        return nullcontext()

    def close(self) -> None:
        """See Followers."""
