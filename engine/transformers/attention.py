"""Our attention in a transformers model: through transformers' attention interface if the model's
code uses it, else by own_attention.

A step's tokens run through the model as one sequence [1, tokens] without padding; only attention
uses the sequences' boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from baton_kernels.kv_write import kv_write
from baton_kernels.paged_attention import (
    AttentionPlan,
    PlanKey,
    ScoreTerms,
    paged_attention,
)
from engine.torch.sequence_states import SequenceStates
from engine.transformers.shared import Share

#: Attention names in a model's config: without a mask, so that models create none; and with a mask
#: that is ignored, for code that modifies its mask first.
IMPLEMENTATION, WITH_MASK = "baton", "baton_with_mask"
#: Attribute of an attention module that holds its LayerAttention.
_ATTRIBUTE = "baton_attention"


class Attention(Protocol):
    """Attention as called by a module: query, key, value [1, heads, tokens, head_dim] -> [1,
    tokens, heads, head_dim]. settings: keyword arguments of transformers' attention functions."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        settings: Mapping[str, Any],
    ) -> torch.Tensor: ...


def register() -> None:
    """Register IMPLEMENTATION and WITH_MASK with transformers."""
    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionInterface.register(WITH_MASK, attend)
    AttentionMaskInterface.register(WITH_MASK, _no_mask)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function, for modules prepared by `set_attention`."""
    attention: Attention = getattr(module, _ATTRIBUTE)
    return attention(module, query, key, value, attention_mask, settings), None


def set_attention(module: torch.nn.Module, attention: Attention) -> None:
    """Set the attention that the module calls."""
    setattr(module, _ATTRIBUTE, attention)


def _no_mask(**_: Any) -> torch.Tensor:
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs of all layers of a step. rows: see kv_write; layer_done: called with a layer's index
    once its KV is in the pool; states: of each sequence, in the order of their tokens, if the model
    has any; first_layer: the layer that is the pool's first."""

    pool: torch.Tensor
    scales: torch.Tensor | None
    rows: torch.Tensor
    plans: Mapping[PlanKey, AttentionPlan]
    layer_done: Callable[[int], None] | None
    states: tuple[SequenceStates, ...] = ()
    first_layer: int = 0


class ForwardContextHolder:
    """Holds a model's current step for its layers, because their calls do not carry it."""

    def __init__(self) -> None:
        self._step: ForwardContext | None = None

    @property
    def step(self) -> ForwardContext:
        """The current step. Raises RuntimeError outside a step."""
        if self._step is None:
            raise RuntimeError("the model was called outside a step")
        return self._step

    def run(self, step: ForwardContext, forward: Callable[[], Any]) -> Any:
        """Call `forward` with `step` as the current step."""
        self._step = step
        try:
            return forward()
        finally:
            self._step = None


class LayerAttention:
    """Attention of one layer over the paged pool. See Attention."""

    def __init__(
        self,
        holder: ForwardContextHolder,
        layer: int,
        key: PlanKey,
        share: Share,
        *,
        is_reader: bool,
    ) -> None:
        """layer: index of its KV in the model. share: the heads that this rank computes. is_reader:
        an earlier layer has written this layer's KV."""
        self._holder, self._layer, self._key, self._share = holder, layer, key, share
        self._is_reader = is_reader

    def __call__(
        self,
        module: torch.nn.Module,  # noqa: ARG002
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,  # noqa: ARG002
        settings: Mapping[str, Any],
    ) -> torch.Tensor:
        step, share = self._holder.step, self._share
        layer = self._layer - step.first_layer
        sinks: torch.Tensor | None = settings.get("s_aux")
        slopes: torch.Tensor | None = settings.get("slopes")
        terms = ScoreTerms(
            softcap=settings.get("softcap"),
            sinks=None if sinks is None else share.heads(sinks).float().contiguous(),
            slopes=None if slopes is None else share.heads(slopes),
        )
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        own = (share.heads(query[0]), *(share.heads(x[0], num_kv_heads) for x in (key, value)))
        # Models may compute queries and keys wider than values.
        queries, keys, values = (x.transpose(0, 1).to(value.dtype).contiguous() for x in own)
        if not self._is_reader:
            kv_write(step.pool, layer, step.rows, keys, values, step.scales)
            if step.layer_done is not None:
                share.meet()
                step.layer_done(layer)
        plan = step.plans[self._key]
        out = paged_attention(queries, keys, values, step.pool, layer, plan, step.scales, terms)
        width = num_heads * out.shape[2]
        return share.gather(out.flatten(1), width).view(1, -1, num_heads, out.shape[2])
