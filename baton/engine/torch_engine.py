"""An engine over torch: a model's parameters, its KV pool, and one forward for prefill, decode and verification.

Numerics. A sequence's tokens come from its own rows alone: linear layers, norms and the sampler work row by row, and attention
reads only the sequence's own KV.
With the native CPU kernels (baton_kernels.cpu: AVX-512 with BF16 and VNNI, float32 and bfloat16) every sum has one order, so
that KV and logits are bit for bit the same whatever the batch mix, chunking, block size and number of threads.
With torch's operations the batch mix and chunking change the order in which a matrix product or a softmax sums, so that
logits differ by rounding: about 1e-6 of their size in float32, about 1e-2 in bfloat16. Greedy outputs are therefore the same
but where two logits are closer than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from baton.engine.followers import Followers, NoFollowers, TensorPool
from baton.engine.interface import (
    Batch,
    Computed,
    Engine,
    EngineSpec,
    Launched,
    LayersDone,
    SampleRow,
)
from baton.engine.torch_step import check_batch, fault, pack_batch, sample_rows
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder
from baton.model.rope import Rope
from baton.sampling.sampler import NothingAllowedError, broken_rows, sample
from baton.types import Sample

#: Rows of a prompt that are scored at once: each takes vocab_size * 4 bytes, a few times over.
NUM_SCORED_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Model:
    config: ModelConfig
    decoder: Decoder
    rope: Rope


class TorchEngine(Engine):
    """See baton.engine.interface.Engine. Driven by one thread."""

    def __init__(
        self,
        spec: EngineSpec,
        config: ModelConfig,
        decoder: Decoder,
        rope: Rope,
        kv: TensorPool,
        layer_group_size: int,
        followers: Followers | None = None,
    ) -> None:
        """config: with the heads that are here. layer_group_size: layers that a forward tells `layers_done` of at once.
        followers: the other ranks' processes, if there are any."""
        self._layer_group_size = layer_group_size
        self._followers: Followers = followers or NoFollowers()
        self._spec = spec
        self._model = _Model(config, decoder, rope)
        self._kv = kv

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def kv(self) -> TensorPool:
        return self._kv

    def close(self) -> None:
        """End the other ranks' processes, which end by themselves with this one. The engine cannot be used after that."""
        self._followers.close()

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        """See Engine.launch. Raises EngineFault whose metadata["slices"] lists, separated by commas, the indices of the
        slices at fault: a batch without them runs."""
        rows, _, owners = sample_rows(batch)
        samples: dict[int, Sample] = {}
        with torch.inference_mode():
            states = self._run(batch, layers_done)
            for group in _row_groups(rows):
                logits = self._logits(states, group)
                if broken := broken_rows(logits):
                    told = "the model's output is not finite"
                    raise fault(told, [owners[group[i]] for i in broken])
                try:
                    found = sample(logits, [rows[i] for i in group])
                except NothingAllowedError as error:
                    raise fault(str(error), [owners[group[i]] for i in error.rows]) from None
                samples.update(zip(group, found, strict=True))
        split: list[list[Sample]] = [[] for _ in batch.slices]
        for index, owner in enumerate(owners):
            split[owner].append(samples[index])
        return Computed(tuple(map(tuple, split)))

    def logits(self, batch: Batch, layers_done: LayersDone | None = None) -> torch.Tensor:
        """Write the new tokens' KV; returns the logits of all sample rows, slice by slice, [rows, vocab] float32."""
        with torch.inference_mode():
            states = self._run(batch, layers_done)
            return self._logits(states, range(len(states)))

    def _logits(self, states: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Of these rows, [rows, vocab] float32."""
        some = states if len(rows) == len(states) else states[rows]
        with self._followers.logits(rows):
            return self._model.decoder.logits(some)

    def _run(self, batch: Batch, layers_done: LayersDone | None) -> torch.Tensor:
        """Write the new tokens' KV; returns the states of all sample rows, slice by slice, [rows, hidden]."""
        spec, model = self._spec, self._model
        check_batch(
            batch, spec.layout.block_size, spec.num_blocks, spec.vocab_size, spec.max_model_len
        )
        if not batch.slices:
            return torch.empty(0, model.config.hidden_size)
        done = (
            _in_groups(layers_done, model.config.num_layers, self._layer_group_size)
            if layers_done
            else None
        )
        with self._followers.step(batch, is_told=done is not None):
            packed = pack_batch(
                batch, model.config, model.rope, self._kv.tensor, model.decoder.dtype
            )
            return model.decoder.forward(packed, self._kv.tensor, done, self._kv.scales)


def _row_groups(rows: Sequence[SampleRow]) -> Iterator[list[int]]:
    """Indices of rows whose logits are held at once: those that draw, of which there are as many as sequences, all
    together; those that score a prompt, of which there are as many as tokens, some at a time."""
    drawn = [i for i, row in enumerate(rows) if row.scored_token_id is None]
    scored = [i for i, row in enumerate(rows) if row.scored_token_id is not None]
    if drawn:
        yield drawn
    for first in range(0, len(scored), NUM_SCORED_ROWS):
        yield scored[first : first + NUM_SCORED_ROWS]


def _in_groups(layers_done: LayersDone, num_layers: int, size: int) -> Callable[[int], None]:
    """Tell `layers_done` about groups of `size` consecutive layers instead of each."""

    def done(layer: int) -> None:
        end = layer + 1
        if end % size == 0 or end == num_layers:
            first = layer // size * size
            layers_done(first, end - first)

    return done
