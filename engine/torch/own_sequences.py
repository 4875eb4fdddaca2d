"""Data-parallel attention: the forward of a step with its sequences divided among ranks that share
the experts of each layer."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from engine.interface import Batch
from engine.ranks.exchange import Ranks
from engine.ranks.mesh import Degrees
from engine.ranks.sequence_shares import divide_sequences
from engine.torch.context_kv import ContextKv
from engine.torch.decoder import Decoder
from engine.torch.divided import (
    DividedForward,
    Forward,
    LayerDone,
    forward_divided,
    forward_shares,
)
from engine.torch.step import WindowedStep


class OwnPool(Protocol):
    """See TorchKvPool."""

    tensor: torch.Tensor
    scales: torch.Tensor | None


def forward_own_sequences(
    context: Ranks,
    decoder: Decoder,
    batch: Batch,
    windowed: WindowedStep,
    forward: Forward,
    layer_done: LayerDone | None,
) -> torch.Tensor:
    """See engine.torch.divided.DividedForward. decoder: this rank's; one without sequences in this
    step computes with its experts alone.

    Ranks have one KV pool, so that a sequence may be another rank's in the next step. They meet
    after each layer's KV, because sequences may share blocks.
    """
    shares = divide_sequences(batch, context.shard.size)

    def run(own: Batch, windowed: WindowedStep, layer_done: LayerDone | None) -> torch.Tensor:
        if own.slices:
            return forward(own, windowed, layer_done)
        return decoder.serve_experts(layer_done)

    return forward_shares(context, shares, windowed, run, layer_done)


def divided_by(
    degrees: Degrees, context: Ranks, decoder: Decoder, own_pool: OwnPool | None
) -> DividedForward:
    """How the ranks of a context share steps. own_pool: this rank's; None if they have one."""
    if degrees.by_sequence:
        return partial(forward_own_sequences, context, decoder)
    if own_pool is None:
        return partial(forward_divided, context, None)
    kv = ContextKv(context, own_pool.tensor, own_pool.scales)
    return partial(forward_divided, context, kv.exchange_of)


def expert_ranks(degrees: Degrees, context: Ranks) -> Ranks | None:
    """Ranks with other tokens among which experts are placed; None without. See Decoder."""
    return context if degrees.by_sequence else None
