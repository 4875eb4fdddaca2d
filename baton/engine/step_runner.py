"""How a batch gets through the decoder, as the engine sees it: a forward now, and logits of its
sample rows when they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.engine.followers import Followers, TensorPool
from baton.engine.interface import Batch
from baton.engine.torch_step import pack_batch, take_drawn
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder
from baton.model.rope import Rope

#: Called with each layer's index, in order, once the KV of that layer is in the pool, or queued to
#: be on the pool's stream.
LayerDone = Callable[[int], None]


class Step(Protocol):
    """A forward that ran."""

    @property
    def num_rows(self) -> int:
        """Sample rows of the batch, which are counted slice by slice."""
        ...

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Of these sample rows, [rows, vocab] float32, on the engine's device. Overwritten, on the
        device's stream, by the next step."""
        ...


class StepRunner(Protocol):
    """Runs steps. Called by the engine's thread, in inference mode, with batches that check_batch
    let pass."""

    def run(
        self, batch: Batch, layer_done: LayerDone | None, drawn: torch.Tensor | None = None
    ) -> Step:
        """Write the new tokens' KV. drawn: [rows] int64 on the device, what the step before drew,
        for slices that follow it. Waits for nothing that the device was given before."""
        ...


@dataclass(frozen=True, slots=True)
class StepModel:
    """What steps are made of. config: with the heads that are here; kv: the pool that is read and
    written."""

    config: ModelConfig
    decoder: Decoder
    rope: Rope
    kv: TensorPool


@dataclass(frozen=True, slots=True)
class EagerStep:
    """states [rows, hidden], of the batch's sample rows."""

    states: torch.Tensor
    decoder: Decoder
    followers: Followers

    @property
    def num_rows(self) -> int:
        """See Step."""
        return len(self.states)

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """See Step."""
        some = self.states if len(rows) == self.num_rows else self.states[rows]
        with self.followers.logits(rows):
            return self.decoder.logits(some)


class EagerSteps:
    """Any batch, operation by operation, by all ranks."""

    def __init__(self, model: StepModel, followers: Followers) -> None:
        """followers: the other ranks' processes."""
        self._model = model
        self._followers = followers

    def run(
        self, batch: Batch, layer_done: LayerDone | None, drawn: torch.Tensor | None = None
    ) -> EagerStep:
        """See StepRunner."""
        config, decoder, pool = self._model.config, self._model.decoder, self._model.kv
        if not batch.slices:
            states = torch.empty(0, config.hidden_size)
            return EagerStep(states, decoder, self._followers)
        with self._followers.step(batch, is_told=layer_done is not None):
            packed = pack_batch(batch, config, self._model.rope, pool.tensor, decoder.dtype)
            take_drawn(packed.token_ids, batch, drawn)
            states = decoder.forward(packed, pool.tensor, layer_done, pool.scales)
        return EagerStep(states, decoder, self._followers)
