"""The forward of a decoder over a packed batch: prefill, decode and verification alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from baton.model.config import ModelConfig
from baton.model.parameters import LayerParameters, Linear, Parameters
from baton_kernels.kv_write import kv_write
from baton_kernels.paged_attention import AttentionPlan, paged_attention
from baton_kernels.rms_norm import rms_norm
from baton_kernels.rope import rope
from baton_kernels.swiglu import swiglu


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A step's tokens one sequence after the other, and what its layers need to know. All on the engine's device.

    token_ids [tokens] int64; cos, sin [tokens, head_dim / 2] of the model's dtype; slot_rows as
    baton_kernels.kv_write.slot_rows gives them; plans by window.
    """

    token_ids: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slot_rows: torch.Tensor
    plans: Mapping[int | None, AttentionPlan]


class Decoder:
    """Parameters and how to run them. Holds no state of any sequence: KV is in the pool that it is given."""

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        self._config = config
        self._parameters = parameters

    def forward(
        self,
        batch: PackedBatch,
        pool: torch.Tensor,
        layer_done: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Write the tokens' KV into `pool`; returns the last layer's output [tokens, hidden], not yet normalised.

        `layer_done` is called with each layer's index once the KV of that layer is written.
        """
        hidden = F.embedding(batch.token_ids, self._parameters.embeddings)
        for index, layer in enumerate(self._parameters.layers):
            hidden = hidden + self._attention(index, layer, hidden, batch, pool, layer_done)
            hidden = hidden + self._mlp(layer, hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs of forward [rows, hidden] -> logits [rows, vocab] float32."""
        normalised = rms_norm(hidden, self._parameters.norm, self._config.rms_norm_eps)
        return F.linear(normalised, self._parameters.lm_head).float()

    def _attention(
        self,
        index: int,
        layer: LayerParameters,
        hidden: torch.Tensor,
        batch: PackedBatch,
        pool: torch.Tensor,
        layer_done: Callable[[int], None] | None,
    ) -> torch.Tensor:
        config = self._config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        normalised = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        fused = _linear(normalised, layer.qkv).view(-1, heads + 2 * kv_heads, dim)
        query, key, value = fused.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = rms_norm(query, layer.q_norm, config.rms_norm_eps)
            key = rms_norm(key, layer.k_norm, config.rms_norm_eps)
        query, key = rope(query, batch.cos, batch.sin), rope(key, batch.cos, batch.sin)
        kv_write(pool, index, batch.slot_rows, key, value)
        if layer_done is not None:
            layer_done(index)
        plan = batch.plans[config.windows[index]]
        mixed = paged_attention(query, key, value, pool, index, plan)
        return _linear(mixed.flatten(1), layer.output)

    def _mlp(self, layer: LayerParameters, hidden: torch.Tensor) -> torch.Tensor:
        normalised = rms_norm(hidden, layer.post_norm, self._config.rms_norm_eps)
        return _linear(swiglu(_linear(normalised, layer.gate_up)), layer.down)


def _linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    return F.linear(x, linear.weight, linear.bias)
