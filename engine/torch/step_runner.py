"""Interface from the engine to a decoder: a forward of a batch now, and logits of its sample rows
later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from baton_kernels.paged_attention import plan_attention
from baton_kernels.sampling import checked_argmax
from engine.families.config import ModelConfig
from engine.interface import Batch
from engine.ranks.followers import Followers, TensorPool
from engine.torch.decoder import Decoder, Watch
from engine.torch.device_tables import DeviceTables
from engine.torch.divided import DividedForward, LayerDone, undivided
from engine.torch.rope import Rope
from engine.torch.step import (
    NO_ADAPTERS,
    PlanAttention,
    WindowedStep,
    pack_batch,
    sample_rows,
    take_drawn,
    windowed_step,
)
from engine.torch.step_adapters import StepAdapters

#: Why an engine supports no draft head.
NO_STATES = (
    "a head needs the target's hidden states, which only one process that runs Baton's own layers "
    "keeps; give ngram, or draft with a model"
)


class StepDecoder(Protocol):
    """A decoder after a step's forward; see engine.torch.decoder.Decoder."""

    def collect(self, num_rows: int) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def best(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class StepOutput(Protocol):
    """Result of a forward."""

    @property
    def num_rows(self) -> int:
        """Sample rows of the batch, counted slice by slice."""
        ...

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Logits of these sample rows, [rows, vocab] float32, on the engine's device. The next step
        overwrites them, in stream order."""
        ...

    def best(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """checked_argmax of the logits of these sample rows."""
        ...


class StepRunner(Protocol):
    """Runs steps. Called by the engine's thread, in inference mode, with batches that passed
    check_batch."""

    def run(
        self, batch: Batch, layer_done: LayerDone | None, drawn: torch.Tensor | None = None
    ) -> StepOutput | FirstStage:
        """Write the new tokens' KV. drawn: [rows] int64 on the device, tokens drawn by the step
        before, for slices that follow it. Does not wait for work queued on the device. With
        several stages, `layer_done` is called for those of the first."""
        ...


@runtime_checkable
class WatchableSteps(StepRunner, Protocol):
    """A runner that can keep hidden states of its steps."""

    @property
    def model(self) -> StepModel:
        """The model that steps run."""
        ...

    def watch(self, layers: Sequence[int] | None) -> None:
        """Make later steps keep the states at the inputs of these layers, see Watch; empty: the
        last states after the norm. None: keep nothing."""
        ...


@dataclass(frozen=True, slots=True)
class StepModel:
    """Model, pool and adapters for steps. config: with this rank's heads; kv: pool to read and
    write; adapters: that slices may name; plan_attention: attention planner of the pool's device;
    given_windows: WindowedStep of a batch on a rank that gets rank 0's tables."""

    config: ModelConfig
    decoder: Decoder
    rope: Rope
    kv: TensorPool
    adapters: StepAdapters = NO_ADAPTERS
    plan_attention: PlanAttention = plan_attention
    given_windows: Callable[[Batch], WindowedStep] | None = None

    def windowed(self, batch: Batch) -> WindowedStep:
        """Windowed layers' view of the pool in a step. Raises EngineFault, see window_tables."""
        if self.given_windows is not None:
            return self.given_windows(batch)
        return windowed_step(batch, self.kv)


@dataclass(frozen=True, slots=True)
class EagerStep:
    """states: [rows, hidden] at the batch's sample rows. watched: see Decoder.forward."""

    states: torch.Tensor
    decoder: StepDecoder
    followers: Followers
    watched: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """See StepOutput."""
        return len(self.states)

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """See StepOutput."""
        with self.followers.logits(rows):
            return self.decoder.logits(self._states_of(rows))

    def best(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """See StepOutput."""
        with self.followers.best(rows):
            return self.decoder.best(self._states_of(rows))

    def _states_of(self, rows: Sequence[int]) -> torch.Tensor:
        return self.states if len(rows) == len(self.states) else self.states[rows]


@dataclass(frozen=True, slots=True)
class AdaptedStep(EagerStep):
    """A step with adapters that change the output layer. owners: adapter of each sample row."""

    decoder: Decoder
    adapters: StepAdapters = NO_ADAPTERS
    owners: Sequence[str] = ()

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """See StepOutput."""
        states, owners = self._states_of(rows), [self.owners[row] for row in rows]
        return self.decoder.logits(states, self.adapters.rows(owners, owners, states.device))

    def best(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """See StepOutput."""
        return checked_argmax(self.logits(rows))


@dataclass(frozen=True, slots=True)
class FirstStage:
    """A forward that later stages have not completed. num_rows: sample rows of the batch. All are
    collected, in the order in which they were run."""

    num_rows: int
    decoder: StepDecoder
    followers: Followers

    def collect(self) -> EagerStep:
        """Wait for the last stage."""
        with self.followers.collect():
            states = self.decoder.collect(self.num_rows)
        return EagerStep(states, self.decoder, self.followers)


class EagerSteps:
    """Runs any batch op by op, on all ranks."""

    def __init__(
        self,
        model: StepModel,
        followers: Followers,
        tables: DeviceTables | None = None,
        divided: DividedForward = undivided,
    ) -> None:
        """followers: processes of the other ranks. tables: block tables on the device; None on the
        host. divided: how ranks share a step's tokens."""
        self._divided = divided
        self._model = model
        self._tables = tables
        self._followers = followers
        self._watched_layers: tuple[int, ...] | None = None

    @property
    def model(self) -> StepModel:
        """See WatchableSteps."""
        return self._model

    def watch(self, layers: Sequence[int] | None) -> None:
        """See WatchableSteps."""
        self._watched_layers = None if layers is None else tuple(layers)

    def run(
        self, batch: Batch, layer_done: LayerDone | None, drawn: torch.Tensor | None = None
    ) -> EagerStep | FirstStage:
        """See StepRunner."""
        model, config, decoder = self._model, self._model.config, self._model.decoder
        pool = model.kv
        if not batch.slices:
            states = torch.empty(0, config.hidden_size)
            return EagerStep(states, decoder, self._followers)
        apart = model.windowed(batch)  # before any rank gets the step: it may raise
        watch = Watch(self._watched_layers) if self._watched_layers else None

        def forward(
            batch: Batch, windowed: WindowedStep, layer_done: LayerDone | None
        ) -> torch.Tensor:
            packed = pack_batch(
                batch,
                config,
                model.rope,
                pool.tensor,
                decoder.dtype,
                model.adapters,
                self._tables,
                model.plan_attention,
                windowed,
            )
            if drawn is not None:
                take_drawn(packed.token_ids, batch, drawn)
            return decoder.forward(packed, pool.tensor, layer_done, pool.scales, watch)

        with self._followers.step(batch, apart.tables, syncs_layers=layer_done is not None):
            states = self._divided(batch, apart, forward, layer_done)
        if decoder.stage.size > 1:
            return FirstStage(len(sample_rows(batch)[0]), decoder, self._followers)
        watched = None
        if self._watched_layers is not None:
            watched = states if watch is None else watch.take()
        owners = [part.adapter for part in batch.slices for _ in part.rows]
        if any(owners) and model.adapters.changes_output:
            return AdaptedStep(states, decoder, self._followers, watched, model.adapters, owners)
        return EagerStep(states, decoder, self._followers, watched)
