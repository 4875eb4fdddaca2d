"""Steps of a transformers model: on one process, and each rank's part of them on several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.interface import Batch
from engine.kv.groups.state import STATE
from engine.kv.tensors.state_memory import SlotStates
from engine.ranks.followers import Followers, TensorPool
from engine.torch.divided import LayerDone
from engine.torch.sequence_states import NO_PLACE, StepStates
from engine.torch.step import fault, pack_tokens, sample_rows, take_drawn
from engine.torch.step_runner import EagerStep, FirstStage
from engine.transformers.load import TransformersDecoder


@dataclass(frozen=True, slots=True)
class RankForward:
    """A rank's part of a forward. pool, scales: of the rank's KV; states: None without layers that
    have any."""

    decoder: TransformersDecoder
    pool: torch.Tensor
    scales: torch.Tensor | None
    states: StepStates | None

    def run(
        self,
        batch: Batch,
        places: Sequence[Sequence[int]],
        layer_done: LayerDone | None,
        drawn: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """States [rows, hidden] of the sample rows. places: of the sequences' states, see
        StepStates. drawn: see StepRunner."""
        tokens = pack_tokens(batch, self.pool)
        if drawn is not None:
            take_drawn(tokens.token_ids, batch, drawn)
        most_rows = self.decoder.most_state_rows
        of_sequences = tuple(self.states.of_step(batch, places, most_rows)) if self.states else ()
        return self.decoder.forward(tokens, self.pool, layer_done, self.scales, of_sequences)


class TransformersSteps:
    """See StepRunner."""

    def __init__(
        self, decoder: TransformersDecoder, pool: TensorPool, followers: Followers
    ) -> None:
        self._decoder, self._followers = decoder, followers
        self._memory: SlotStates | None = pool.records.get(STATE)
        states = step_states(self._memory)
        self._forward = RankForward(decoder, pool.tensor, pool.scales, states)

    def run(
        self, batch: Batch, layer_done: LayerDone | None, drawn: torch.Tensor | None = None
    ) -> EagerStep | FirstStage:
        """See StepRunner."""
        if not batch.slices:
            return EagerStep(torch.empty(0, 0), self._decoder, self._followers)
        places = begin_step(self._memory, batch)
        with self._followers.step(batch, places, syncs_layers=layer_done is not None):
            hidden = self._forward.run(batch, places, layer_done, drawn)
        end_step(self._memory, batch)
        if self._decoder.stage.size > 1:
            return FirstStage(len(sample_rows(batch)[0]), self._decoder, self._followers)
        return EagerStep(hidden, self._decoder, self._followers)


def step_states(memory: SlotStates | None) -> StepStates | None:
    """The states as steps of one rank use them; None without layers that have any."""
    if memory is None:
        return None
    return StepStates(torch.as_tensor(memory.data), memory.layout)


def begin_step(memory: SlotStates | None, batch: Batch) -> tuple[tuple[int, int], ...]:
    """Numbers of the places of the states before and after each slice; none without layers that
    have any. Raises EngineFault for a slice with missing earlier states."""
    return () if memory is None else tuple(_begin(memory, batch))


def end_step(memory: SlotStates | None, batch: Batch) -> None:
    """Note that a step after begin_step has written the states after each slice."""
    if memory is not None:
        for part in batch.slices:
            memory.end_step(part.block_table, part.start, part.start + len(part.token_ids))


def _begin(memory: SlotStates, batch: Batch) -> Iterator[tuple[int, int]]:
    for index, part in enumerate(batch.slices):
        try:
            before, after = memory.begin_step(part.block_table, part.start)
        except ValueError as error:
            raise fault(str(error), [index]) from error
        yield NO_PLACE if before is None else before.number, after.number
