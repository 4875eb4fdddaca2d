"""A rank other than 0: loads its part of the model and executes commands.

Protocol on the connection for commands: one line with a RankSpec; when the rank has loaded, its
answer, one line {"digest": ...}; then commands.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Protocol, cast

import torch

from baton.types import KvLayout
from engine.kv.groups.state import STATE
from engine.kv.interface import KvPool
from engine.kv.tensors.paged import TorchKvPool
from engine.kv.tensors.ranks import own_kv_pool
from engine.kv.tensors.state_memory import StateMemory, state_bytes, state_records
from engine.ranks.backends import BACKENDS
from engine.ranks.commands import (
    BestCommand,
    CollectCommand,
    Command,
    CopyCommand,
    LogitsCommand,
    StepCommand,
    read_commands,
)
from engine.ranks.exchange import Groups
from engine.ranks.link import Link
from engine.ranks.peers import watch_peers
from engine.ranks.rank_spec import RankSpec
from engine.ranks.segment import map_segment
from engine.ranks.stages import Stages
from engine.ranks.step_marks import StepMarks
from engine.torch.divided import LayerDone
from engine.torch.step import sample_rows
from engine.torch.step_runner import StepDecoder


class RankSteps(Protocol):
    """A rank's part of each step. States are [rows, hidden]. All ranks make the same calls."""

    @property
    def decoder(self) -> StepDecoder:
        """Computes the rank's part of logits and greedy tokens, for rank 0."""
        ...

    def run(self, command: StepCommand, layer_done: LayerDone | None) -> torch.Tensor:
        """Write the batch's KV; returns the states of its sample rows, in the first of several
        stages unfinished ones."""
        ...


class LoadedRank(Protocol):
    """A rank's part of a model. digest: of the whole checkpoint."""

    @property
    def digest(self) -> str: ...

    def join(self, groups: Groups, stages: Stages) -> RankSteps:
        """Called once all ranks have loaded."""
        ...


#: Loads a rank's part of a model. pools: of the rank, see pool_sizes; states: memory of the states
#: of RankSpec.states_layout, see StateMemory. Raises ModelError.
LoadRank = Callable[[RankSpec, Sequence[TorchKvPool], torch.Tensor], LoadedRank]


def follow(control: socket.socket, link: Link) -> None:
    """Serve as a rank until rank 0 closes its end. link: to rank 0, not yet started. Raises
    ModelError if loading fails, and any error of a step."""
    with control.makefile("rb") as stream, torch.inference_mode():
        line = stream.readline()
        if not line:  # rank 0 has refused another rank, or ended
            return
        spec = RankSpec.from_line(line)
        link.start()
        torch.set_num_threads(spec.num_threads)
        if spec.torch_device.type == "cuda":
            torch.cuda.set_device(spec.torch_device)
        load: LoadRank = import_module(spec.code).load_rank
        pools, states = _memory(spec)
        model = load(spec, pools, states)
        marks = StepMarks(pools[0].mark)
        if spec.kv_service:
            make_pool = partial(_kv_pool, spec, pools)
            import_module(spec.kv_service).serve(link, make_pool, spec.host, marks)
        control.sendall(json.dumps({"digest": model.digest}).encode() + b"\n")
        backend = BACKENDS[spec.backend]()
        groups, stages = backend.join(spec), backend.stages(spec)
        rank = _Rank(model.join(groups, stages), stages, pools, marks)
        watch_peers(spec, link)
        for command in read_commands(stream):
            rank.follow(command)


class _Rank:
    """A rank at work. Used by one thread."""

    def __init__(
        self,
        steps: RankSteps,
        stages: Stages,
        pools: Sequence[TorchKvPool],
        marks: StepMarks,
    ) -> None:
        self._steps, self._stage, self._pools = steps, stages.stage, pools
        self._marks = marks
        self._states = torch.empty(0)
        self._in_flight: deque[int] = deque()
        """Rows of each step that the first of several stages has not collected."""

    def follow(self, command: Command) -> None:
        """Execute a command."""
        stage, decoder = self._stage, self._steps.decoder
        match command:
            case StepCommand():
                # Rank 0 reports the layers of other stages once it has collected a step.
                is_synced = command.syncs_layers and stage.is_first
                layer_done = self._marks.layer_done if is_synced else None
                self._states = self._steps.run(command, layer_done)
                self._marks.command_done()
                if stage.size > 1 and stage.is_first:
                    self._in_flight.append(len(sample_rows(command.batch)[0]))
            case CollectCommand():
                self._states = decoder.collect(self._in_flight.popleft())
            case LogitsCommand():
                decoder.logits(self._states[torch.tensor(command.rows)])
            case BestCommand():
                decoder.best(self._states[torch.tensor(command.rows)])
            case CopyCommand():
                self._copy(command)
                self._marks.command_done()

    def _copy(self, command: CopyCommand) -> None:
        if command.pool < len(self._pools):
            self._pools[command.pool].copy_rows(command.sources, command.targets)
        else:
            states = cast(StateMemory, self._pools[0].records[STATE])
            states.copy_slots(command.sources, command.targets)


def _kv_pool(spec: RankSpec, pools: Sequence[TorchKvPool], layout: KvLayout) -> KvPool:
    """The rank's part of the model's KV. layout: of the whole model."""
    return own_kv_pool(spec.parts[spec.rank], layout, pools)


def _memory(spec: RankSpec) -> tuple[list[TorchKvPool], torch.Tensor]:
    """A rank's pools and states: in memory shared with rank 0, or of its own."""
    if spec.has_own_kv:
        layout, num_slots = spec.states_layout, spec.num_state_slots
        states = torch.zeros(state_bytes(layout, num_slots), dtype=torch.uint8)
        records = state_records(layout, spec.pools[0].num_blocks, num_slots, states.numpy())
        pools = [size.own_pool(spec.rank, spec.torch_device, records) for size in spec.pools]
        return pools, states
    *memories, states = torch.split(map_segment(spec.kv_fd), spec.memory_bytes)
    pools = []
    for memory, size in zip(memories, spec.pools, strict=True):
        # Each rank touches its own pages: they are allocated on its NUMA node, and no step pays for
        # page faults.
        size.memory_of(memory, spec.rank).zero_()
        pools.append(size.pool_of(memory, spec.rank))
    return pools, states
