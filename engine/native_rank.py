"""A rank's part of a model of Baton's own families: see engine.follower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.cuda.graph_device import CalledGraphs, CudaGraphs
from engine.families.config import ModelConfig
from engine.interface import Batch
from engine.kv.tensors.paged import TorchKvPool
from engine.ranks.commands import StepCommand
from engine.ranks.exchange import Groups
from engine.ranks.followers import NoFollowers
from engine.ranks.rank_spec import RankSpec
from engine.ranks.stages import Stages
from engine.torch.decoder import Decoder
from engine.torch.device_tables import DeviceTables, table_width
from engine.torch.divided import LayerDone
from engine.torch.load import load_parameters
from engine.torch.native_decoder import make_decoder
from engine.torch.own_sequences import divided_by, expert_ranks
from engine.torch.packed import PackedParameters
from engine.torch.rope import Rope, make_rope
from engine.torch.step import NOT_APART, WindowedStep, pack_batch
from engine.torch.step_runner import EagerSteps, StepModel, StepRunner
from engine.torch.weights import no_progress


def load_rank(spec: RankSpec, pools: Sequence[TorchKvPool], states: torch.Tensor) -> _Loaded:  # noqa: ARG001
    """See engine.follower.LoadRank. Raises ModelError."""
    whole = spec.config
    if not isinstance(whole, ModelConfig):
        raise TypeError(f"{spec.name} has no config of Baton's own families")
    dtype, shard = getattr(torch, spec.dtype), spec.shard
    parameters, digest = load_parameters(
        *(Path(spec.folder), whole, dtype, spec.torch_device, no_progress, shard, spec.stage),
        batch_invariant=spec.batch_invariant,
    )
    config = shard.attention_config(whole).of_layers(spec.stage.layers(whole.num_layers))
    return _Loaded(spec, config, parameters, digest, make_rope(whole, spec.torch_device), pools)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """See engine.follower.LoadedRank. config: with the rank's layers and heads."""

    spec: RankSpec
    config: ModelConfig
    parameters: PackedParameters
    digest: str
    rope: Rope
    pools: Sequence[TorchKvPool]

    def join(self, groups: Groups, stages: Stages) -> _Steps:
        """See LoadedRank."""
        return _Steps(self, groups, stages)

    def windowed(self, tables: Sequence[Sequence[int]]) -> WindowedStep:
        """Windowed layers' view of the pools in a step with these tables."""
        _, *apart = self.pools
        return WindowedStep(tables, apart[0].tensor, apart[0].scales) if apart else NOT_APART

    def record(
        self, decoder: Decoder, given_windows: Callable[[Batch], WindowedStep]
    ) -> StepRunner | None:
        """Record decode steps, while all other ranks do; None if none are to be recorded."""
        recording, device = self.spec.recording, self.spec.torch_device
        if recording is None:
            return None
        # Imported here, because it imports Triton, which is optional.
        from engine.cuda.recorded_decoder import RecordedDecoder
        from engine.cuda.recording import record_steps

        pool, *apart = self.pools
        width = table_width(recording.max_len, pool.layout.block_size)
        tables = DeviceTables(recording.max_seqs, width, device, has_slots=bool(apart))
        parts = StepModel(self.config, decoder, self.rope, pool, given_windows=given_windows)
        graphs = CudaGraphs(device) if device.type == "cuda" else CalledGraphs(device)
        eager = EagerSteps(parts, NoFollowers(), tables)
        return record_steps(
            *(recording, RecordedDecoder(parts), tables, graphs, eager, NoFollowers()),
            batch_invariant=self.spec.batch_invariant,
        )


class _Steps:
    """See engine.follower.RankSteps."""

    def __init__(self, model: _Loaded, groups: Groups, stages: Stages) -> None:
        self._model, degrees = model, model.spec.degrees
        pool_dtype = model.pools[0].tensor.dtype
        self.decoder = make_decoder(
            *(model.config, model.parameters, pool_dtype, groups.tensor),
            stages=stages,
            experts=expert_ranks(degrees, groups.context),
        )
        own_pool = model.pools[0] if model.spec.has_own_kv else None
        self._divided = divided_by(degrees, groups.context, self.decoder, own_pool)
        self._windowed = model.windowed(())
        self._replayed = model.record(self.decoder, lambda _: self._windowed)

    def run(self, command: StepCommand, layer_done: LayerDone | None) -> torch.Tensor:
        """See RankSteps. A replayed step leaves its states to the records."""
        self._windowed = self._model.windowed(command.tables)
        if command.replays and self._replayed is not None:
            self._replayed.run(command.batch, None)
            return torch.empty(0)
        model, decoder = self._model, self.decoder
        pool = model.pools[0]

        def forward(
            batch: Batch, windowed: WindowedStep, layer_done: LayerDone | None
        ) -> torch.Tensor:
            packed = pack_batch(
                batch, model.config, model.rope, pool.tensor, decoder.dtype, apart=windowed
            )
            return decoder.forward(packed, pool.tensor, layer_done, pool.scales)

        return self._divided(command.batch, self._windowed, forward, layer_done)
