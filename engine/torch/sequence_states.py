"""A sequence's states in a step, of a model that has layers with a state: what such a layer reads,
and what it writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SequenceStates:
    """Of the sequence whose new tokens are [first_token, first_token + num_tokens) of the step's.

    before: [state_layers, elements] float32, the states before the first of them, which nobody
    changes; None at a sequence's beginning. after: the same after the last of them, to be written
    as a whole.
    """

    first_token: int
    num_tokens: int
    before: torch.Tensor | None
    after: torch.Tensor
