"""How a batch gets through the decoder, as the engine sees it: a forward now, and logits of its
sample rows when they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from baton_kernels.paged_attention import plan_attention
from engine.families.config import ModelConfig
from engine.interface import Batch
from engine.kv.tensors.paged import GroupedTensorPool
from engine.ranks.followers import Followers, TensorPool
from engine.torch.adapters import Adapter
from engine.torch.decoder import Decoder, Watch
from engine.torch.device_tables import DeviceTables
from engine.torch.rope import Rope
from engine.torch.step import (
    NOT_APART,
    PlanAttention,
    WindowedStep,
    pack_batch,
    take_drawn,
    window_tables,
)

#: Why a draft head cannot be had of an engine.
NO_STATES = (
    "a head needs the target's hidden states, which only one process on a CPU that runs Baton's "
    "own layers keeps; give ngram, or draft with a model"
)

#: Called with each layer's index, in order, once the KV of that layer is in the pool, or queued to
#: be on the pool's stream.
LayerDone = Callable[[int], None]


class StepOutput(Protocol):
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
    ) -> StepOutput:
        """Write the new tokens' KV. drawn: [rows] int64 on the device, what the step before drew,
        for slices that follow it. Waits for nothing that the device was given before."""
        ...


@dataclass(frozen=True, slots=True)
class StepModel:
    """What steps are made of. config: with the heads that are here; kv: the pool that is read and
    written; adapters: by name; plan_attention: that of the pool's device."""

    config: ModelConfig
    decoder: Decoder
    rope: Rope
    kv: TensorPool
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    plan_attention: PlanAttention = plan_attention


@dataclass(frozen=True, slots=True)
class EagerStep:
    """states [rows, hidden], of the batch's sample rows. watched: see Decoder.forward."""

    states: torch.Tensor
    decoder: Decoder
    followers: Followers
    watched: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """See StepOutput."""
        return len(self.states)

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """See StepOutput."""
        some = self.states if len(rows) == len(self.states) else self.states[rows]
        with self.followers.logits(rows):
            return self.decoder.logits(some)


class EagerSteps:
    """Any batch, operation by operation, by all ranks."""

    def __init__(
        self, model: StepModel, followers: Followers, tables: DeviceTables | None = None
    ) -> None:
        """followers: the other ranks' processes. tables: of a device that is not the host."""
        self._model = model
        self._tables = tables
        self._followers = followers
        self._watched_layers: tuple[int, ...] | None = None

    @property
    def model(self) -> StepModel:
        """What runs."""
        return self._model

    def watch(self, layers: Sequence[int] | None) -> None:
        """From now on steps keep the states before these layers, see Watch; of none of them, the
        last ones after the norm. None: they keep nothing."""
        self._watched_layers = None if layers is None else tuple(layers)

    def run(
        self, batch: Batch, layer_done: LayerDone | None, drawn: torch.Tensor | None = None
    ) -> EagerStep:
        """See StepRunner."""
        model, config, decoder = self._model, self._model.config, self._model.decoder
        pool = model.kv
        if not batch.slices:
            states = torch.empty(0, config.hidden_size)
            return EagerStep(states, decoder, self._followers)
        apart = _windowed(batch, pool)
        with self._followers.step(batch, apart.tables, is_told=layer_done is not None):
            packed = pack_batch(
                batch,
                config,
                model.rope,
                pool.tensor,
                decoder.dtype,
                model.adapters,
                self._tables,
                model.plan_attention,
                apart,
            )
            if drawn is not None:
                take_drawn(packed.token_ids, batch, drawn)
            watch = Watch(self._watched_layers) if self._watched_layers else None
            states = decoder.forward(packed, pool.tensor, layer_done, pool.scales, watch)
        if self._watched_layers is None:
            return EagerStep(states, decoder, self._followers)
        watched = states if watch is None else watch.take()
        return EagerStep(states, decoder, self._followers, watched)


def _windowed(batch: Batch, pool: TensorPool) -> WindowedStep:
    """What windowed layers of a step see of a pool. Raises EngineFault, see window_tables: before
    any rank has been given the step."""
    if not isinstance(pool, GroupedTensorPool):
        return NOT_APART
    own = pool.in_slots
    return WindowedStep(window_tables(batch, pool), own.tensor, own.scales)
