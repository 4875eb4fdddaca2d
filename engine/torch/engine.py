"""An engine over torch: a model's parameters, its KV pool, and one forward for prefill, decode and
verification.

Numerics. A sequence's tokens come from its own rows alone: linear layers, norms and the sampler
work row by row, and attention reads only the sequence's own KV. With the native CPU kernels
(baton_kernels.cpu: AVX-512 with BF16 and VNNI, float32 and bfloat16) every sum has one order, so
that KV and logits are bit for bit the same whatever the batch mix, chunking, block size and number
of threads. With torch's operations the batch mix and chunking change the order in which a matrix
product or a softmax sums, so that logits differ by rounding: about 1e-6 of their size in float32,
about 1e-2 in bfloat16. Greedy outputs are therefore the same but where two logits are closer than
that.
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
from engine.ranks.followers import Followers, NoFollowers, TensorPool
from engine.sampling.sampler import Draws, RowsError, draw
from engine.torch.step import check_batch, fault, sample_rows
from engine.torch.step_runner import NO_STATES, EagerStep, EagerSteps, StepOutput, StepRunner

#: Rows of a prompt that are scored at once: each takes vocab_size * 4 bytes, a few times over.
NUM_SCORED_ROWS = 64


#: Of a launch: its batch, and states [rows, ...] of its sample rows, slice by slice.
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
    ) -> None:
        """steps: they read and write `kv`. layer_group_size: layers that a forward reports to
        `layers_done` at once. followers: the other ranks' processes, if there are any, which are
        ended with the engine. wait_device: waits for all that the device was given, and raises
        RuntimeError if it can do nothing any more."""
        self._layer_group_size = layer_group_size
        self._followers = followers
        self._spec = spec
        self._kv = kv
        self._steps = steps
        self._wait_device = wait_device
        self._on_states: OnStates | None = None
        self._drawn: torch.Tensor | None = None
        """[rows] int64, of the last launch, on the device; None where nothing may follow it."""

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def kv(self) -> TensorPool:
        return self._kv

    @property
    def device(self) -> torch.device:
        """Where all is computed."""
        return self._kv.tensor.device

    def watchable_steps(self) -> EagerSteps:
        """What `watch` needs. Raises ConfigError on a GPU, of several ranks, and where
        transformers' code runs the layers."""
        is_alone = isinstance(self._followers, NoFollowers)
        if not isinstance(self._steps, EagerSteps) or not is_alone or self.device.type != "cpu":
            raise ConfigError.of("speculative_method", "eagle, medusa or mtp", NO_STATES)
        return self._steps

    def watch(self, layers: Sequence[int], on_states: OnStates | None) -> None:
        """From now on `on_states` gets each launch's batch, and the hidden states of its sample
        rows: see EagerSteps.watch. None: nobody does, and steps keep none. Raises ConfigError, see
        watchable_steps."""
        steps = self.watchable_steps()
        self._on_states = on_states
        steps.watch(None if on_states is None else layers)

    def close(self) -> None:
        """End the other ranks' processes, which end by themselves with this one. The engine cannot
        be used after that."""
        self._followers.close()

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        """See Engine.launch. Waits for nothing on a GPU. Raises EngineFault, here or when the
        samples are asked for, whose metadata["slices"] lists, separated by commas, the indices of
        the slices at fault: a batch without them runs. Raises DeviceLost, likewise."""
        rows, _, owners = sample_rows(batch)
        before, self._drawn = self._drawn, None
        with torch.inference_mode(), device_checked(self._wait_device):
            step = self._run(batch, layers_done, before)
            if self._on_states is not None and isinstance(step, EagerStep):
                self._on_states(batch, step.watched)
            # Rows that draw, of which there are as many as sequences, at once; those that score a
            # prompt, of which there are as many as tokens, some at a time.
            drawn = [i for i, row in enumerate(rows) if row.scored_token_id is None]
            scored = [i for i, row in enumerate(rows) if row.scored_token_id is not None]
            first_rows = range(0, len(scored), NUM_SCORED_ROWS)
            groups = tuple(
                (tuple(group), draw(step.logits(group), [rows[i] for i in group]))
                for group in (
                    drawn,
                    *(scored[first : first + NUM_SCORED_ROWS] for first in first_rows),
                )
                if group
            )
            if self._spec.max_num_launches > 1:
                # Nothing follows several groups, some of which score a prompt.
                is_whole = len(groups) == 1 and len(groups[0][0]) == len(rows)
                self._drawn = groups[0][1].chosen if is_whole else None
            # Draws come to the host behind the step; of a step without any, this is all that says
            # when it is over.
            end = None if groups else Fence(self._kv.tensor.device)
        return _TorchLaunch(len(batch.slices), tuple(owners), groups, end, self._wait_device)

    def logits(self, batch: Batch, layers_done: LayersDone | None = None) -> torch.Tensor:
        """Write the new tokens' KV; returns the logits of all sample rows, slice by slice, [rows,
        vocab] float32."""
        with torch.inference_mode():
            step = self._run(batch, layers_done, None)
            return step.logits(range(step.num_rows))

    def _run(
        self, batch: Batch, layers_done: LayersDone | None, drawn: torch.Tensor | None
    ) -> StepOutput:
        """Write the new tokens' KV. drawn: see StepRunner."""
        num_layers, size = self._spec.layout.num_layers, self._layer_group_size
        check_batch(batch, self._spec, 0 if drawn is None else len(drawn))

        def layer_done(layer: int) -> None:
            end = layer + 1
            if layers_done and (end % size == 0 or end == num_layers):
                first = layer // size * size
                layers_done(first, end - first)

        return self._steps.run(batch, layers_done and layer_done, drawn)


@contextmanager
def device_checked(wait_device: Callable[[], None]) -> Iterator[None]:
    """What goes wrong in the body is the body's own fault only if the device still works after it:
    an illegal access or a failed assertion is reported by whatever call comes next, and by every
    one after that. Raises DeviceLost if it does not. Being out of memory passes, and faults that
    requests are charged with need no asking."""
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


@dataclass(frozen=True, slots=True)
class _TorchLaunch:
    """Implements Launched. owners: the slice of each row; groups: rows that were drawn at once, and
    what they drew; end: of a launch that draws nothing."""

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
