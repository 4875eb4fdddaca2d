"""The states of a sequence in a step, for models with state layers: input and output of these
layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SequenceStates:
    """States of the sequence with the step's tokens [first_token, first_token + num_tokens).

    before: [state_layers, elements] float32, the states before its first token, read-only; None at
    the beginning of a sequence. after: the states after its last token, to be filled completely.
    """

    first_token: int
    num_tokens: int
    before: torch.Tensor | None
    after: torch.Tensor
