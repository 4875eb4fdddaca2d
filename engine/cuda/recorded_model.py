"""Interface of recorded decode steps to a model, independent of the code that runs its layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton_kernels.paged_attention import AttentionPlan, PlanKey
from engine.interface import Batch, SequenceSlice
from engine.ranks.followers import TensorPool
from engine.torch.decoder import WindowedKv
from engine.torch.step import WindowedStep


@dataclass(frozen=True, slots=True)
class RecordedSizes:
    """Sizes of a model, or of a rank's part of one, that plans of recorded steps depend on. keys:
    of the attention plans of a step; token_bytes: of activations, per token."""

    keys: tuple[PlanKey, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class StaticTokens:
    """The tokens of a recorded step, one of each sequence, as tensors on the device that each
    replay computes anew from the static buffer.

    token_ids, positions, first_rows, lengths [seqs] int64: see PackedTokens, and
    engine.torch.rope for lengths; a padding sequence has a negative row, which is not written.
    plans: of attention, by key. windowed: KV of windowed layers, if it has its own pool. columns:
    further numbers [seqs] int64, see RecordedModel.columns.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    first_rows: torch.Tensor
    lengths: torch.Tensor
    plans: Mapping[PlanKey, AttentionPlan]
    windowed: WindowedKv | None
    columns: Sequence[torch.Tensor]


class RecordedModel(Protocol):
    """A model and its KV memory, as recorded decode steps run them.

    num_columns: see columns. has_adapters: steps with adapters can be recorded.
    """

    @property
    def kv(self) -> TensorPool: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def sizes(self) -> RecordedSizes: ...

    @property
    def num_columns(self) -> int: ...

    @property
    def has_adapters(self) -> bool: ...

    def windowed(self, batch: Batch) -> WindowedStep:
        """Windowed layers' view of the pool in a step. Raises EngineFault, see window_tables."""
        ...

    def takes(self, part: SequenceSlice) -> bool:
        """Whether a recorded step can run the slice, if it has a sequence for each new token."""
        ...

    def begin_step(self, batch: Batch) -> Sequence[Sequence[int]]:
        """Tables of each slice that a step needs beside its block table, for `columns` and the
        other ranks. Raises EngineFault for slices with adapters, slots or states that are not
        there."""
        ...

    def columns(
        self, batch: Batch, tables: Sequence[Sequence[int]], num_padding: int
    ) -> Iterable[tuple[int, ...]]:
        """num_columns further numbers for each new token, then for each of num_padding padding
        sequences. tables: of begin_step."""
        ...

    def end_step(self, batch: Batch) -> None:
        """Called once a step is queued on the device."""
        ...

    def logits(self, tokens: StaticTokens, *, is_adapted: bool) -> torch.Tensor:
        """Write the tokens' KV; their logits [seqs, vocab], or this rank's part. Waits for nothing
        and reads nothing of the host. is_adapted: with additions of the model's adapters."""
        ...
