"""Rank 0's interface to the other ranks of its engine, and the empty one of a single rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from baton.types import KvLayout
from engine.interface import Batch
from engine.kv.interface import KvPool
from engine.kv.kv_ranks import KvRanks
from engine.kv.tensors.copy_order import copy_order
from engine.kv.tensors.device_states import records_on
from engine.kv.tensors.paged import GroupedDevicePool, TorchKvPool
from engine.ranks.exchange import ALONE, Groups
from engine.ranks.stages import OneStage, Stages
from engine.shard import WHOLE, Shard


class TensorPool(KvPool, Protocol):
    """A KV pool over tensors. tensor, scales: this process's part, see TorchKvPool. records: see
    PackedPool."""

    tensor: torch.Tensor
    scales: torch.Tensor | None
    records: Mapping[int, Any]


class Followers(Protocol):
    """The other ranks: started with the engine, given each command just before rank 0 runs it,
    closed with the engine.

    Rank 0 runs its own part inside the contexts of `step`, `logits` and `best`. An exception inside
    leaves the ranks out of step, so the process has to end.
    """

    @property
    def shard(self) -> Shard:
        """Rank 0's part of its layers."""
        ...

    @property
    def stages(self) -> Stages:
        """Rank 0's links to other stages, after wait_ready."""
        ...

    def wait_ready(self, digest: str) -> Groups:
        """Wait until all ranks have loaded and joined: rank 0's groups. digest: of the checkpoint
        as read by rank 0. Raises StartupError."""
        ...

    def make_pool(
        self,
        layout: KvLayout,
        num_blocks: int,
        num_window_slots: int,
        num_state_slots: int,
        device: torch.device,
    ) -> TensorPool:
        """The blocks of all ranks, and the states. layout: of the whole model. num_window_slots: 0
        if blocks hold the KV of all layers, see GroupedKvPool. num_state_slots: see
        SlotStates."""
        ...

    def kv_ranks(self, pool: TensorPool) -> KvRanks | None:
        """Ranks that send and receive their own KV; None if `pool`, of all ranks, is reached by
        rank 0 alone."""
        ...

    def step(
        self,
        batch: Batch,
        tables: Sequence[Sequence[int]],
        *,
        syncs_layers: bool = False,
        replays: bool = False,
    ) -> AbstractContextManager[None]:
        """Send a forward. syncs_layers: ranks synchronise after every layer, for a `layers_done`.
        replays: each replays the graph that it has recorded of the step's shape. tables: see
        WindowedStep."""
        ...

    def collect(self) -> AbstractContextManager[None]:
        """Send a request to receive the states of the oldest forward that is not collected; with
        several stages."""
        ...

    def logits(self, rows: Sequence[int]) -> AbstractContextManager[None]:
        """Send a request for logits of these rows of the last collected forward's states."""
        ...

    def best(self, rows: Sequence[int]) -> AbstractContextManager[None]:
        """Send a request for the likeliest tokens of these rows, likewise."""
        ...

    def close(self) -> None:
        """End the ranks. Idempotent."""
        ...


class NoFollowers:
    """Followers of an engine with one rank: none."""

    shard = WHOLE
    stages = OneStage()

    def wait_ready(self, digest: str) -> Groups:  # noqa: ARG002
        return ALONE

    def make_pool(
        self,
        layout: KvLayout,
        num_blocks: int,
        num_window_slots: int,
        num_state_slots: int,
        device: torch.device,
    ) -> TensorPool:
        if num_window_slots:
            return GroupedDevicePool(layout, num_blocks, num_window_slots, device)
        order = copy_order(device)
        states = records_on(device, layout, num_blocks, num_state_slots, order)
        return TorchKvPool(layout, num_blocks, device, records=states, order=order)

    def kv_ranks(self, pool: TensorPool) -> KvRanks | None:  # noqa: ARG002
        return None

    def step(
        self,
        batch: Batch,  # noqa: ARG002
        tables: Sequence[Sequence[int]],  # noqa: ARG002
        *,
        syncs_layers: bool = False,  # noqa: ARG002
        replays: bool = False,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def collect(self) -> AbstractContextManager[None]:
        return nullcontext()

    def logits(self, rows: Sequence[int]) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def best(self, rows: Sequence[int]) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def close(self) -> None:
        """See Followers."""
