"""A decoder over the native CPU kernels: a few calls for all layers instead of nine per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

from baton_kernels.attention_backends import REFERENCE, AttentionBackend
from baton_kernels.cpu.layers import (
    NUM_STAGES,
    NativeLayer,
    NativeLayers,
    RunningLayers,
    StepKv,
    StepMetadata,
    can_run,
    native_layer,
)
from baton_kernels.cpu.paged_attention import AttentionPlan
from engine.families.config import ModelConfig
from engine.ranks.exchange import Ranks
from engine.ranks.stages import Stages
from engine.torch.decoder import Decoder, PackedBatch, Watch
from engine.torch.packed import PackedParameters


def make_decoder(
    config: ModelConfig,
    parameters: PackedParameters,
    pool_dtype: torch.dtype,
    ranks: Ranks,
    attention: AttentionBackend = REFERENCE,
    stages: Stages | None = None,
    experts: Ranks | None = None,
) -> Decoder:
    """Make the fastest decoder for the parameters' device. All give the same results, bit-identical
    between native kernels.

    config, ranks, attention, stages, experts: see Decoder. Several ranks of a stage, which meet
    within a layer, and other attention backends run op by op.
    """
    embeddings = parameters.embeddings
    if attention.attend is not REFERENCE.attend or experts is not None:
        return Decoder(config, parameters, ranks, attention, stages, experts)
    is_alone = ranks.shard.size == 1 and embeddings.device.type == "cpu"
    if not is_alone or not can_run(embeddings.dtype, pool_dtype, config.head_dim):
        return Decoder(config, parameters, ranks, stages=stages)
    layers = [native_layer(layer) for layer in parameters.layers]
    known = [layer for layer in layers if layer is not None]
    if len(known) < len(layers):
        return Decoder(config, parameters, ranks, stages=stages)
    return NativeDecoder(config, parameters, known, stages)


class NativeDecoder(Decoder):
    """See make_decoder."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: PackedParameters,
        layers: Sequence[NativeLayer],
        stages: Stages | None = None,
    ) -> None:
        super().__init__(config, parameters, stages=stages)
        self._layers = NativeLayers(layers, parameters.norm)

    def forward(
        self,
        batch: PackedBatch,
        pool: torch.Tensor,
        layer_done: Callable[[int], None] | None = None,
        scales: torch.Tensor | None = None,
        watch: Watch | None = None,
    ) -> torch.Tensor:
        """See Decoder.forward. Batches with adapters run op by op."""
        if batch.adapters:
            return super().forward(batch, pool, layer_done, scales, watch)
        config, stage = self._config, self.stage
        hidden = self.begin(batch)
        mixed = hidden.new_empty(hidden.shape[0], config.num_heads * config.head_dim)
        cos, sin = batch.rotations[0]
        # Native plans, because `can_run` holds.
        plans = cast(Mapping[int | None, AttentionPlan], batch.plans)
        apart = batch.windowed
        windowed = StepKv(apart.pool, apart.scales, apart.first_rows) if apart else None
        step = StepMetadata(StepKv(pool, scales, batch.first_rows), cos, sin, plans, windowed)
        max_rows = 0 if batch.sampled is None else len(batch.sampled)
        running = self._layers.begin(hidden, mixed, step, max_rows)
        end = config.num_layers * NUM_STAGES
        first = 0
        if watch is not None:
            for layer in watch.layers:
                if layer == config.num_layers:
                    break
                _run_to(running, first, layer * NUM_STAGES, layer_done)
                first = layer * NUM_STAGES
                watch.add(hidden, batch.sampled)
        _run_to(running, first, end - 1, layer_done)
        if batch.sampled is not None and stage.is_last:
            hidden, mixed = hidden[batch.sampled], mixed[batch.sampled]
            running.goes_on_with(hidden, mixed)
        if watch is not None and config.num_layers in watch.layers:
            running.run(end - 1, end)
            watch.add(hidden, None)
            running.run(end, end + 1)
            return hidden
        # The rest of the last layer, and the final norm unless other stages follow.
        running.run(end - 1, end + (stage.size == 1))
        if stage.size > 1:
            self._stages.send(hidden)
        return hidden


def _run_to(
    running: RunningLayers, first: int, end: int, layer_done: Callable[[int], None] | None
) -> None:
    """Run stages from `first`, the start of a layer, up to `end`; pause after each layer's KV write
    to report it."""
    if layer_done is None:
        running.run(first, end)
        return
    for after_kv in range(first + 1, end, NUM_STAGES):
        running.run(first, after_kv)
        layer_done(after_kv // NUM_STAGES)
        first = after_kv
    running.run(first, end)
