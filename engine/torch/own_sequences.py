"""Data-parallel attention: the forward of a step with its sequences divided among ranks that share
the experts of each layer."""

from __future__ import annotations

from functools import partial

import torch

from engine.interface import Batch
from engine.ranks.exchange import Ranks
from engine.ranks.mesh import Degrees
from engine.ranks.sequence_shares import divide_sequences
from engine.torch.decoder import Decoder
from engine.torch.divided import (
    DividedForward,
    Forward,
    LayerDone,
    forward_divided,
    forward_shares,
)
from engine.torch.step import WindowedStep


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


def divided_by(degrees: Degrees, context: Ranks, decoder: Decoder) -> DividedForward:
    """How the ranks of a context share steps."""
    if degrees.by_sequence:
        return partial(forward_own_sequences, context, decoder)
    return partial(forward_divided, context)


def expert_ranks(degrees: Degrees, context: Ranks) -> Ranks | None:
    """Ranks with other tokens among which experts are placed; None without. See Decoder."""
    return context if degrees.by_sequence else None
