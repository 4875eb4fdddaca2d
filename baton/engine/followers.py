"""The other ranks of an engine, as rank 0, which leads them, sees them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from baton.engine.interface import Batch, KvPool
from baton.engine.torch_kv_pool import TorchKvPool
from baton.model.shard import Alone, Ranks
from baton.types import KvLayout


class TensorPool(KvPool, Protocol):
    """A KV pool over tensors. tensor, scales: what this process's forward reads and writes of it,
    as TorchKvPool's."""

    tensor: torch.Tensor
    scales: torch.Tensor | None

    def wrote(self) -> None:
        """In the engine's thread, before others are told of KV that its kernels write: what is
        packed from now on has it."""
        ...


class Followers(Protocol):
    """Started with the engine, told what to do just before rank 0 does it, ended with it.

    The contexts of `step` and `logits` are those of rank 0's own part. An exception in one of them
    leaves the ranks apart for good, so that nothing but an end of the process can follow.
    """

    @property
    def ranks(self) -> Ranks: ...

    def wait_ready(self, digest: str) -> None:
        """Return when all have loaded. digest: of the checkpoint as rank 0 read it. Raises
        StartupError."""
        ...

    def make_pool(self, layout: KvLayout, num_blocks: int, device: torch.device) -> TensorPool:
        """The blocks of all ranks, `layout` being that of the whole model."""
        ...

    def step(self, batch: Batch, *, is_told: bool) -> AbstractContextManager[None]:
        """A forward, and whether it has a `layers_done`."""
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

    def make_pool(self, layout: KvLayout, num_blocks: int, device: torch.device) -> TensorPool:
        """See Followers."""
        return TorchKvPool(layout, num_blocks, device)

    def step(self, batch: Batch, *, is_told: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """See Followers."""
        return nullcontext()

    def logits(self, rows: Sequence[int]) -> AbstractContextManager[None]:  # noqa: ARG002
        """See Followers."""
        return nullcontext()

    def close(self) -> None:
        """See Followers."""
