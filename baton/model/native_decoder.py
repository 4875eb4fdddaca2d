"""The decoder over the native CPU kernels: its layers in a few calls instead of nine for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

from baton.model.config import ModelConfig
from baton.model.decoder import Decoder, PackedBatch
from baton.model.packed import PackedLayer, PackedParameters
from baton.model.shard import Ranks
from baton_kernels.cpu.int_linear import NativeIntLinear
from baton_kernels.cpu.layers import (
    NUM_STAGES,
    LayerShape,
    NativeForm,
    NativeLayer,
    NativeLayers,
    RunningLayers,
    Step,
    can_run,
)
from baton_kernels.cpu.linear import NativeLinear
from baton_kernels.cpu.paged_attention import AttentionPlan
from baton_kernels.linear import Linear


def make_decoder(
    config: ModelConfig, parameters: PackedParameters, pool_dtype: torch.dtype, ranks: Ranks
) -> Decoder:
    """The fastest decoder for where the parameters are. All give the same, to the bit where both
    run native kernels.

    config and ranks: see Decoder. Several ranks meet within a layer, so that they run it operation
    by operation.
    """
    embeddings = parameters.embeddings
    is_alone = ranks.shard.size == 1 and embeddings.device.type == "cpu"
    if not is_alone or not can_run(embeddings.dtype, pool_dtype, config.head_dim):
        return Decoder(config, parameters, ranks)
    layers = _native_layers(config, parameters)
    if layers is None:
        return Decoder(config, parameters, ranks)
    return NativeDecoder(config, parameters, layers)


class NativeDecoder(Decoder):
    """See make_decoder."""

    def __init__(
        self, config: ModelConfig, parameters: PackedParameters, layers: Sequence[NativeLayer]
    ) -> None:
        super().__init__(config, parameters)
        shape = LayerShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
        )
        self._layers = NativeLayers(layers, parameters.norm, shape)

    def forward(
        self,
        batch: PackedBatch,
        pool: torch.Tensor,
        layer_done: Callable[[int], None] | None = None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See Decoder.forward."""
        config, parameters = self._config, self._parameters
        hidden = parameters.embeddings.index_select(0, batch.token_ids)
        mixed = hidden.new_empty(hidden.shape[0], config.num_heads * config.head_dim)
        step = Step(pool, scales, batch.cos, batch.sin, batch.first_rows, _native_plans(batch))
        max_rows = 0 if batch.sampled is None else len(batch.sampled)
        running = self._layers.begin(hidden, mixed, step, max_rows)
        end = config.num_layers * NUM_STAGES
        _run_to(running, end - 1, layer_done)
        if batch.sampled is not None:
            hidden, mixed = hidden[batch.sampled], mixed[batch.sampled]
            running.goes_on_with(hidden, mixed)
        # With the norm after the last layer.
        running.run(end - 1, end + 1)
        return hidden


def _run_to(running: RunningLayers, end: int, layer_done: Callable[[int], None] | None) -> None:
    """Stages up to `end`, stopping to tell where a layer's KV is written."""
    if layer_done is None:
        running.run(0, end)
        return
    first = 0
    for after_kv in range(1, end, NUM_STAGES):
        running.run(first, after_kv)
        layer_done(after_kv // NUM_STAGES)
        first = after_kv
    running.run(first, end)


def _native_plans(batch: PackedBatch) -> Mapping[int | None, AttentionPlan]:
    """The batch's plans, which are native wherever `can_run` holds."""
    return cast(Mapping[int | None, AttentionPlan], batch.plans)


def _native_layers(config: ModelConfig, parameters: PackedParameters) -> list[NativeLayer] | None:
    """None if a layer has a linear layer of another form."""
    layers = [
        _native_layer(layer, window)
        for layer, window in zip(parameters.layers, config.windows, strict=True)
    ]
    return [layer for layer in layers if layer] if all(layers) else None


def _native_layer(layer: PackedLayer, window: int | None) -> NativeLayer | None:
    forms = [_native_form(x) for x in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    qkv, output, gate_up, down = forms
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    return NativeLayer(
        input_norm=layer.input_norm,
        qkv=qkv,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        output=output,
        post_norm=layer.post_norm,
        gate_up=gate_up,
        down=down,
        window=window,
    )


def _native_form(linear: Linear) -> NativeForm | None:
    return linear if isinstance(linear, NativeLinear | NativeIntLinear) else None
