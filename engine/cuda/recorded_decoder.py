"""Models of Baton's own families as recorded decode steps run them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from baton_kernels.paged_attention import PlanKey
from engine.cuda.recorded_model import RecordedSizes, StaticTokens
from engine.families.config import ModelConfig
from engine.interface import Batch, SequenceSlice
from engine.memory_plan import token_bytes
from engine.ranks.followers import TensorPool
from engine.torch.decoder import AdapterRows, PackedBatch
from engine.torch.grouped_adapters import GroupedAdapters
from engine.torch.step import WindowedStep, check_adapters
from engine.torch.step_runner import StepModel


def sizes_of(config: ModelConfig, dtype: torch.dtype) -> RecordedSizes:
    """config: with this rank's heads. dtype: of the weights."""
    scale = config.traits.attention_scale
    windows = sorted(set(config.windows), key=lambda window: window or 0)
    return RecordedSizes(
        tuple(PlanKey(scale, window) for window in windows),
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.num_layers,
        config.vocab_size,
        token_bytes(config, dtype.itemsize),
    )


class RecordedDecoder:
    """See RecordedModel. A column has the number of a token's adapter, if there are any."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        adapters = model.adapters
        self._adapters = adapters if isinstance(adapters, GroupedAdapters) else None
        self.kv: TensorPool = model.kv
        self.dtype = model.decoder.dtype
        self.sizes = sizes_of(model.config, self.dtype)
        self.has_adapters = self._adapters is not None
        self.num_columns = int(self.has_adapters)

    def windowed(self, batch: Batch) -> WindowedStep:
        """See RecordedModel."""
        return self._model.windowed(batch)

    def takes(self, part: SequenceSlice) -> bool:  # noqa: ARG002
        """See RecordedModel. A layer writes the KV of all tokens before it attends."""
        return True

    def begin_step(self, batch: Batch) -> Sequence[Sequence[int]]:
        """See RecordedModel: tables of windowed layers' slots."""
        if any(part.adapter for part in batch.slices):
            check_adapters(batch, self._model.adapters)
        return self.windowed(batch).tables

    def columns(
        self,
        batch: Batch,
        tables: Sequence[Sequence[int]],  # noqa: ARG002
        num_padding: int,
    ) -> Iterable[tuple[int, ...]]:
        """See RecordedModel."""
        if self._adapters is None:
            return ()
        numbering = self._adapters.numbering
        owners = [part.adapter for part in batch.slices for _ in part.token_ids]
        return [(numbering[name],) for name in (*owners, *[""] * num_padding)]

    def end_step(self, batch: Batch) -> None:
        """See RecordedModel."""

    def logits(self, tokens: StaticTokens, *, is_adapted: bool) -> torch.Tensor:
        """See RecordedModel."""
        model = self._model
        decoder = model.decoder
        adapters: tuple[AdapterRows, ...] = ()
        if self._adapters is not None and is_adapted:
            adapters = (self._adapters.of_tokens(*tokens.columns),)
        batch = PackedBatch(
            tokens.token_ids,
            model.rope.compute(tokens.positions, tokens.lengths, decoder.dtype),
            tokens.first_rows,
            {key.window: plan for key, plan in tokens.plans.items()},
            None,
            adapters,
            tokens.windowed,
        )
        states = decoder.forward(batch, model.kv.tensor, None, model.kv.scales)
        return decoder.logits(states, batch.adapters)
