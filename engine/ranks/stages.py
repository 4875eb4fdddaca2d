"""Links between the stages of a pipeline, and the link of an engine without one.

The ranks with the same part of each layer form a ring. States go from stage to stage; those of the
sampled rows come back from the last stage to the first, which computes logits.

    stage 0: embed, layers ──[tokens, hidden]──> stage 1: layers ──[tokens, hidden]──> stage 2: ...
       ▲ collect: norm, logits                                                           │
       └────────────────────────────────[rows, hidden]───────────────────────────────────┘
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.ranks.mesh import ALL_LAYERS, Stage


class Stages(Protocol):
    """A rank's links in its ring. All messages of a link are received in the order of sending, with
    the shapes in which they were sent: both sides know the batch."""

    @property
    def stage(self) -> Stage: ...

    def send(self, states: torch.Tensor) -> None:
        """Pass states [rows, hidden], contiguous, to the next stage, or from the last one to the
        first. Returns before they are received, as long as launches are within the engine's
        limits. The caller does not change them any more."""
        ...

    def receive(self, states: torch.Tensor) -> None:
        """Wait for the next states of the previous stage, in the first one for those of the last;
        write them to `states`."""
        ...


class OneStage:
    """Stages of an engine with all layers on each rank: nothing is sent."""

    stage = ALL_LAYERS

    def send(self, states: torch.Tensor) -> None:
        """See Stages."""

    def receive(self, states: torch.Tensor) -> None:
        """See Stages."""
