"""An engine over torch: a model's parameters, its KV pool, and one forward for prefill, decode and
verification.

Numerics. A sequence's tokens depend on its own rows alone: linear layers, norms and the sampler
work row by row, and attention reads only the sequence's own KV. With the native CPU kernels
(baton_kernels.cpu: AVX-512 with BF16 and VNNI, float32 and bfloat16) every sum has one order, so
that KV and logits are bit-identical for any batch mix, chunking, block size and number of threads.
With torch's operations, batch mix and chunking change the order of sums in matrix products and
softmax, so that logits differ by rounding: about 1e-6 of their size in float32, about 1e-2 in
bfloat16. Greedy outputs are equal unless two logits are closer than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from baton.errors import BatonError, ConfigError
from baton.types import Sample
from baton_kernels.host_copy import Fence
from engine.interface import (
    Batch,
    DeviceLost,
    Engine,
    EngineSpec,
    Launched,
    LayersDone,
)
from engine.kv.kv_ranks import KvRanks
from engine.ranks.followers import Followers, NoFollowers, TensorPool
from engine.sampling.sampler import Draws, RowsError, draw, take_best, takes_best
from engine.torch.step import check_batch, fault, sample_rows
from engine.torch.step_runner import (
    NO_STATES,
    EagerStep,
    FirstStage,
    StepOutput,
    StepRunner,
    WatchableSteps,
)

#: Rows of a prompt that are scored at once: each takes a few times vocab_size * 4 bytes.
NUM_SCORED_ROWS = 64


#: Called with a launch's batch and the states [rows, ...] of its sample rows, slice by slice.
OnStates = Callable[[Batch, torch.Tensor | None], None]


class TorchEngine(Engine):
    """See engine.interface.Engine. Driven by one thread."""

    def __init__(
        self,
        spec: EngineSpec,
        kv: TensorPool,
        steps: StepRunner,
        layer_group_size: int,
        followers: Followers,
        wait_device: Callable[[], None],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """steps: read and write `kv`. layer_group_size: layers per call of `layers_done`.
        followers: processes of the other ranks, which `close` ends. wait_device: waits for all
        queued work; raises RuntimeError if the device is lost."""
        self._layer_group_size = layer_group_size
        self._followers, self._close = followers, close
        self._spec = spec
        self._kv = kv
        self._steps = steps
        self._wait_device = wait_device
        self._on_states: OnStates | None = None
        self._drawn: torch.Tensor | None = None
        """Tokens drawn by the last launch, [rows] int64 on the device; None if no launch may follow
        it without waiting."""

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def kv(self) -> TensorPool:
        return self._kv

    @property
    def kv_ranks(self) -> KvRanks | None:
        return self._followers.kv_ranks(self._kv)

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._kv.tensor.device

    def watchable_steps(self) -> WatchableSteps:
        """Step runner that supports `watch`. Raises ConfigError with several ranks, and with
        transformers' layers."""
        is_alone = isinstance(self._followers, NoFollowers)
        if not isinstance(self._steps, WatchableSteps) or not is_alone:
            raise ConfigError.of("speculative_method", "eagle, medusa or mtp", NO_STATES)
        return self._steps

    def watch(self, layers: Sequence[int], on_states: OnStates | None) -> None:
        """Call `on_states` with each launch's batch and the hidden states of its sample rows from
        now on: see WatchableSteps. None: stop, and keep no states. Raises ConfigError, see
        watchable_steps."""
        steps = self.watchable_steps()
        self._on_states = on_states
        steps.watch(None if on_states is None else layers)

    def close(self) -> None:
        """End the other ranks' processes (they also end with this process). The engine cannot be
        used afterwards."""
        self._close()

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        """See Engine.launch. Waits for nothing on a GPU. Raises EngineFault, here or from the
        samples, with the comma-separated indices of the faulty slices in metadata["slices"]: a
        batch without them runs. Raises DeviceLost, likewise."""
        before, self._drawn = self._drawn, None
        with torch.inference_mode(), device_checked(self._wait_device):
            step, reports = self._run(batch, layers_done, before)
            if isinstance(step, FirstStage):
                return _StagedLaunch(self, batch, step, reports)
            return self.draw(batch, step)

    def draw(self, batch: Batch, step: StepOutput) -> Launched:
        """Draw the samples of a step."""
        rows, _, owners = sample_rows(batch)
        if self._on_states is not None and isinstance(step, EagerStep):
            self._on_states(batch, step.watched)
        # Rows that draw (one or a few per sequence) are handled at once; rows that score a prompt
        # (one per token) in groups. Ranks that share the output layer bring the logits together
        # only of rows that need them all.
        is_shared = self._followers.shard.size > 1
        best, drawn, scored = list[int](), list[int](), list[int]()
        for i, row in enumerate(rows):
            if row.scored_token_id is not None:
                scored.append(i)
            else:
                (best if is_shared and takes_best(row) else drawn).append(i)
        first_rows = range(0, len(scored), NUM_SCORED_ROWS)
        groups = tuple(
            (tuple(group), draw(step.logits(group), [rows[i] for i in group]))
            for group in (
                drawn,
                *(scored[first : first + NUM_SCORED_ROWS] for first in first_rows),
            )
            if group
        )
        if best:
            groups = ((tuple(best), take_best(*step.best(best))), *groups)
        if self._spec.max_num_launches > 1 and not self._spec.is_pipelined:
            # A launch with several groups, some of which score a prompt, cannot be followed.
            is_whole = len(groups) == 1 and len(groups[0][0]) == len(rows)
            self._drawn = groups[0][1].chosen if is_whole else None
        # Draws reach the host after the step. Without draws, only this fence tells when the step is
        # over.
        end = None if groups else Fence(self._kv.tensor.device)
        return _TorchLaunch(len(batch.slices), tuple(owners), groups, end, self._wait_device)

    def logits(self, batch: Batch, layers_done: LayersDone | None = None) -> torch.Tensor:
        """Write the new tokens' KV; return the logits of all sample rows, slice by slice, [rows,
        vocab] float32."""
        with torch.inference_mode():
            step, reports = self._run(batch, layers_done, None)
            whole = reports.collect(step) if isinstance(step, FirstStage) else step
            return whole.logits(range(whole.num_rows))

    def _run(
        self, batch: Batch, layers_done: LayersDone | None, drawn: torch.Tensor | None
    ) -> tuple[StepOutput | FirstStage, _LayerReports]:
        """Write the new tokens' KV, with several stages that of the first one's layers. drawn: see
        StepRunner."""
        check_batch(batch, self._spec, 0 if drawn is None else len(drawn))
        num_layers = self._spec.layout.num_layers
        reports = _LayerReports(layers_done, num_layers, self._layer_group_size)
        return self._steps.run(batch, layers_done and reports.layer_done, drawn), reports


@contextmanager
def device_checked(wait_device: Callable[[], None]) -> Iterator[None]:
    """Raise DeviceLost if an error in the body has left the device unusable: CUDA reports an
    illegal access or a failed assertion with whichever call comes next, and with every later one.
    Out-of-memory errors, and faults charged to requests, pass without a check."""
    try:
        yield
    except (BatonError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        try:
            wait_device()
        except RuntimeError as lost:
            raise DeviceLost(str(lost)) from error
        raise


class _LayerReports:
    """Reports layers of a step by groups. num_layers: of the model."""

    def __init__(self, layers_done: LayersDone | None, num_layers: int, group_size: int) -> None:
        self._layers_done = layers_done
        self._num_layers, self._group_size = num_layers, group_size
        self._num_done = 0

    def layer_done(self, layer: int) -> None:
        """See StepRunner."""
        end = layer + 1
        if end % self._group_size == 0 or end == self._num_layers:
            self._report(end)

    def collect(self, step: FirstStage) -> StepOutput:
        """Wait for a step, and report the layers of later stages."""
        whole = step.collect()
        self._report(self._num_layers)
        return whole

    def _report(self, end: int) -> None:
        if self._layers_done:
            self._layers_done(self._num_done, end - self._num_done)
            self._num_done = end


@dataclass(frozen=True, slots=True)
class _StagedLaunch:
    """Implements Launched: samples are drawn once later stages have completed the step."""

    engine: TorchEngine
    batch: Batch
    step: FirstStage
    reports: _LayerReports

    def samples(self) -> tuple[tuple[Sample, ...], ...]:
        """See Launched."""
        with torch.inference_mode():
            return self.engine.draw(self.batch, self.reports.collect(self.step)).samples()


@dataclass(frozen=True, slots=True)
class _TorchLaunch:
    """Implements Launched. owners: the slice of each row; groups: rows drawn at once, with their
    draws; end: fence of a launch without draws."""

    num_slices: int
    owners: tuple[int, ...]
    groups: tuple[tuple[tuple[int, ...], Draws], ...]
    end: Fence | None
    wait_device: Callable[[], None]

    def samples(self) -> tuple[tuple[Sample, ...], ...]:
        """See Launched, and TorchEngine.launch."""
        if self.end:
            with device_checked(self.wait_device):
                self.end.wait()
        samples: dict[int, Sample] = {}
        for group, draws in self.groups:
            try:
                with device_checked(self.wait_device):
                    found = draws.samples()
            except RowsError as error:
                raise fault(str(error), [self.owners[group[i]] for i in error.rows]) from None
            samples.update(zip(group, found, strict=True))
        split: list[list[Sample]] = [[] for _ in range(self.num_slices)]
        for index, owner in enumerate(self.owners):
            split[owner].append(samples[index])
        return tuple(map(tuple, split))
