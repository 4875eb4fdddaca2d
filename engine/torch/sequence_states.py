"""The states of a step's sequences, for models with state layers: input and output of these
layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from baton.types import KvLayout
from engine.interface import Batch

#: Bytes of a state's element, float32.
ELEMENT_BYTES = 4
#: Instead of the number of a place, before a sequence's first token.
NO_PLACE = -1


@dataclass(frozen=True, slots=True)
class SequenceStates:
    """States of the sequence with the step's tokens [first_token, first_token + num_tokens).

    before: [state_layers, elements] float32, the states before its first token, read-only; None at
    the beginning of a sequence. after: the states after its last token, to be filled completely.
    first_layer: of the model's layers with a state, the first one here.
    """

    first_token: int
    num_tokens: int
    before: torch.Tensor | None
    after: torch.Tensor
    first_layer: int = 0


class StepStates:
    """The places of all slots (see engine.kv.tensors.state_memory), as one rank's steps use them.

    Where ranks share them, each computes the states of its layers, and the first of a
    tensor-parallel group writes them. No rank reads them too late or too early: ranks exchange
    results after each such layer, and a step does not write the places that it reads. Elsewhere
    each rank has those of its layers.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        layout: KvLayout,
        first_layer: int = 0,
        *,
        is_writer: bool = True,
    ) -> None:
        """memory: of SlotStates with that layout, uint8. first_layer: see SequenceStates.
        is_writer: whether this rank's states are kept."""
        self._first_layer = first_layer
        shape = (-1, layout.num_state_layers, layout.state_layer_bytes // ELEMENT_BYTES)
        self._places = memory.view(-1).view(torch.float32).view(shape)
        self._unused = None if is_writer else torch.empty_like(self._places[0])

    def of_step(self, batch: Batch, places: Sequence[Sequence[int]]) -> Iterator[SequenceStates]:
        """Yield the states of each slice. places: numbers of the places before (or NO_PLACE) and
        after it, of each."""
        first_token = 0
        for part, (before, after) in zip(batch.slices, places, strict=True):
            yield SequenceStates(
                first_token,
                len(part.token_ids),
                None if before == NO_PLACE else self._places[before],
                self._places[after] if self._unused is None else self._unused,
                self._first_layer,
            )
            first_token += len(part.token_ids)
