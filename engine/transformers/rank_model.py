"""A rank's part of a transformers model: see engine.follower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.kv.tensors.paged import TorchKvPool
from engine.ranks.commands import StepCommand
from engine.ranks.exchange import Groups
from engine.ranks.rank_spec import ForeignConfig, RankSpec
from engine.ranks.stages import Stages
from engine.torch.divided import LayerDone
from engine.torch.sequence_states import StepStates
from engine.torch.weights import no_progress
from engine.transformers.source import TransformersModel
from engine.transformers.steps import RankForward


def load_rank(spec: RankSpec, pools: Sequence[TorchKvPool], states: torch.Tensor) -> _Loaded:
    """See engine.follower.LoadRank. Raises ModelError."""
    if not isinstance(spec.config, ForeignConfig):
        raise TypeError(f"{spec.name} has a config of Baton's own families")
    source = TransformersModel(Path(spec.folder), spec.config.overrides)
    dtype = getattr(torch, spec.dtype)
    decoder, digest = source.load_decoder(
        dtype, spec.torch_device, no_progress, spec.shard, spec.stage
    )
    layout, of_steps = spec.pools[0].layout, None
    if layout.num_state_layers:
        of_steps = StepStates(states, layout, is_writer=spec.place.tensor_rank == 0)
    (pool,) = pools
    return _Loaded(digest, RankForward(decoder, pool.tensor, pool.scales, of_steps))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """See engine.follower.LoadedRank."""

    digest: str
    forward: RankForward

    def join(self, groups: Groups, stages: Stages) -> _Steps:
        """See LoadedRank."""
        self.forward.decoder.join(groups.tensor, stages)
        return _Steps(self.forward)


class _Steps:
    """See engine.follower.RankSteps."""

    def __init__(self, forward: RankForward) -> None:
        self._forward, self.decoder = forward, forward.decoder

    def run(self, command: StepCommand, layer_done: LayerDone | None) -> torch.Tensor:
        """See RankSteps."""
        return self._forward.run(command.batch, command.tables, layer_done)
