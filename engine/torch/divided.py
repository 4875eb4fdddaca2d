"""Context parallelism: the forward of a step with its tokens divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.interface import Batch
from engine.ranks.exchange import Ranks
from engine.ranks.token_shares import TokenShare, divide
from engine.torch.step import WindowedStep

#: Called with each layer's index, in order, once the KV of that layer is in the pool, or its write
#: is queued on the pool's stream.
LayerDone = Callable[[int], None]
#: Called with the shares of a step's ranks: a function to call after each layer's KV, in which they
#: meet, so that each has the KV of all.
MeetingOf = Callable[[Sequence[TokenShare]], LayerDone]
#: Runs a batch on this rank; returns the states [rows, hidden] of its sample rows.
Forward = Callable[[Batch, WindowedStep, LayerDone | None], torch.Tensor]
#: Runs a step on all ranks of a context, which call it at once; returns as `forward_divided` does.
DividedForward = Callable[[Batch, WindowedStep, Forward, LayerDone | None], torch.Tensor]


def undivided(
    batch: Batch, windowed: WindowedStep, forward: Forward, layer_done: LayerDone | None
) -> torch.Tensor:
    """The DividedForward of one rank."""
    return forward(batch, windowed, layer_done)


def forward_divided(
    context: Ranks,
    exchange_of: MeetingOf | None,
    batch: Batch,
    windowed: WindowedStep,
    forward: Forward,
    layer_done: LayerDone | None,
) -> torch.Tensor:
    """Run this rank's share of a batch; returns the states of all sample rows of the batch, in its
    order.

    context: ranks with the same weights; all call this with the same batch. exchange_of: for ranks
    with a KV pool each; None if they have one pool. Each writes the KV of its own tokens; they meet
    after every layer's, so that each attends to the keys and values of all. A batch that `divide`
    leaves whole is run by each rank with a pool of its own; else by the first rank, and the others
    do nothing, and have no states.
    """
    shares = divide(batch, context.shard.size)
    if shares:
        meeting = exchange_of and exchange_of(shares)
        return forward_shares(context, shares, windowed, forward, layer_done, meeting)
    if exchange_of is None and context.shard.rank > 0:
        return torch.empty(0)
    return forward(batch, windowed, layer_done)


def forward_shares(
    context: Ranks,
    shares: tuple[TokenShare, ...],
    windowed: WindowedStep,
    forward: Forward,
    layer_done: LayerDone | None,
    meeting: LayerDone | None = None,
) -> torch.Tensor:
    """Run this rank's share of a batch with the others, which meet after each layer's KV; returns
    the states of all sample rows. meeting: see MeetingOf; by default they have one pool."""
    own = shares[context.shard.rank]

    def written(layer: int) -> None:
        if meeting is None:
            context.meet()
        else:
            meeting(layer)
        if layer_done is not None:
            layer_done(layer)

    tables = [windowed.tables[index] for index in own.indices] if windowed.tables else ()
    states = forward(own.batch, windowed._replace(tables=tables), written)
    return _collect(context, states, shares)


def _collect(context: Ranks, states: torch.Tensor, shares: tuple[TokenShare, ...]) -> torch.Tensor:
    """Bring together the states of each rank's sample rows. A barrier."""
    size, hidden = len(shares), states.shape[1]
    longest = max(len(share.rows) for share in shares)
    padded = torch.nn.functional.pad(states, (0, 0, 0, longest - len(states)))
    # [rows, ranks * hidden] -> [rows * ranks, hidden].
    gathered = context.gather(padded).view(longest * size, hidden)
    at = {
        row: place * size + rank
        for rank, share in enumerate(shares)
        for place, row in enumerate(share.rows)
    }
    return gathered[[at[row] for row in range(len(at))]]
