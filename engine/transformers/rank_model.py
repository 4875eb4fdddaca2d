"""A rank's part of a transformers model: see engine.follower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from engine.kv.groups.state import STATE
from engine.kv.tensors.paged import TorchKvPool
from engine.kv.tensors.state_memory import StateMemory
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
    (pool,), layout, of_steps = pools, spec.states_layout, None
    if layout.num_state_layers:
        is_writer = spec.has_own_kv or spec.place.tensor_rank == 0
        first_layer = spec.parts[spec.rank].first_state if spec.has_own_kv else 0
        of_steps = StepStates(states, layout, first_layer, is_writer=is_writer)
    memory = cast(StateMemory | None, pool.records.get(STATE))
    return _Loaded(digest, RankForward(decoder, pool.tensor, pool.scales, of_steps), memory)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """See engine.follower.LoadedRank."""

    digest: str
    forward: RankForward
    memory: StateMemory | None

    def join(self, groups: Groups, stages: Stages) -> _Steps:
        """See LoadedRank."""
        self.forward.decoder.join(groups.tensor, stages)
        return _Steps(self.forward, self.memory)


class _Steps:
    """See engine.follower.RankSteps."""

    def __init__(self, forward: RankForward, memory: StateMemory | None) -> None:
        """memory: of the states that the rank sends and receives itself."""
        self._forward, self.decoder = forward, forward.decoder
        self._memory = memory

    def run(self, command: StepCommand, layer_done: LayerDone | None) -> torch.Tensor:
        """See RankSteps."""
        if self._memory is not None:
            # Now, because rank 0 may have the step's result, and send, before this rank goes on.
            for part, (before, after) in zip(command.batch.slices, command.tables, strict=True):
                self._memory.follow_step(before, after, part.start + len(part.token_ids))
        return self._forward.run(command.batch, command.tables, layer_done)
