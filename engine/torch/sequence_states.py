"""The states of a step's sequences, for models with state layers: input and output of these
layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from baton.types import KvLayout
from baton_kernels.host_copy import to_device
from engine.interface import Batch

#: Bytes of a state's element, float32.
ELEMENT_BYTES = 4
#: Instead of the number of a place, before a sequence's first token.
NO_PLACE = -1


@dataclass(frozen=True, slots=True)
class SequenceStates:
    """States of the sequence with the step's tokens [first_token, first_token + num_tokens), or of
    num_tokens sequences with one of these tokens each.

    places: [places, state_layers, elements] float32. before: [sequences] int64, the places of the
    states before the first token, which are only read; None at the beginning of a sequence. after:
    [sequences] int64, the places to be filled completely with the states after the last token; None
    if this rank's are not kept. first_layer: of the model's layers with a state, the first one
    here.
    """

    first_token: int
    num_tokens: int
    places: torch.Tensor
    before: torch.Tensor | None
    after: torch.Tensor | None
    first_layer: int = 0

    @property
    def num_sequences(self) -> int:
        """With this many tokens each sequence has one, if it is not the only one."""
        return 1 if self.before is None else len(self.before)


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
        self._first_layer, self._is_writer = first_layer, is_writer
        shape = (-1, layout.num_state_layers, layout.state_layer_bytes // ELEMENT_BYTES)
        self._places = memory.view(-1).view(torch.float32).view(shape)

    def of_step(
        self, batch: Batch, places: Sequence[Sequence[int]], most_rows: int
    ) -> Iterator[SequenceStates]:
        """Yield the states of all slices, in order; those of neighbours that go on with one token,
        at most most_rows of them, together. places: numbers of the places before (or NO_PLACE) and
        after it, of each."""
        first_token, group = 0, list[Sequence[int]]()
        for part, own in zip(batch.slices, places, strict=True):
            num_tokens = len(part.token_ids)
            is_row = num_tokens == 1 and own[0] != NO_PLACE
            if group and not (is_row and len(group) < most_rows):
                yield self._of(first_token, len(group), group)
                first_token, group = first_token + len(group), []
            if is_row:
                group.append(own)
            else:
                yield self._of(first_token, num_tokens, [own])
                first_token += num_tokens
        if group:
            yield self._of(first_token, len(group), group)

    def of_rows(self, before: torch.Tensor, after: torch.Tensor) -> SequenceStates:
        """The states of sequences with one new token each that go on. before, after: see
        SequenceStates; places may repeat in them for sequences with results that nobody reads."""
        return SequenceStates(0, len(before), self._places, before, after, self._first_layer)

    def _of(
        self, first_token: int, num_tokens: int, places: Sequence[Sequence[int]]
    ) -> SequenceStates:
        before, after = to_device(torch.tensor(places).t().contiguous(), self._places.device)
        return SequenceStates(
            first_token,
            num_tokens,
            self._places,
            None if places[0][0] == NO_PLACE else before,
            after if self._is_writer else None,
            self._first_layer,
        )
