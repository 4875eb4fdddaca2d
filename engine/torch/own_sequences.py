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
    collect_states,
    forward_divided,
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
    own = shares[context.shard.rank]

    def written(layer: int) -> None:
        context.meet()
        if layer_done is not None:
            layer_done(layer)

    if own.batch.slices:
        tables = [windowed.tables[index] for index in own.indices] if windowed.tables else ()
        states = forward(own.batch, windowed._replace(tables=tables), written)
    else:
        states = decoder.serve_experts(written)
    return collect_states(context, states, shares)


def divided_by(degrees: Degrees, context: Ranks, decoder: Decoder) -> DividedForward:
    """How the ranks of a context share steps."""
    if degrees.by_sequence:
        return partial(forward_own_sequences, context, decoder)
    return partial(forward_divided, context)
