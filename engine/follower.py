"""A rank other than 0: loads its part of the model and executes commands.

Protocol on the connection for commands: one line with a RankSpec; when the rank has loaded, its
answer, one line {"digest": ...}; then commands.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from importlib import import_module
from pathlib import Path

import torch

from baton.types import KvLayout
from engine.cuda.graph_device import CalledGraphs, CudaGraphs
from engine.interface import Batch
from engine.kv.interface import KvPool
from engine.kv.tensors.paged import TorchKvPool
from engine.kv.tensors.ranks import own_kv_pool, pool_memories
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
from engine.ranks.followers import NoFollowers
from engine.ranks.link import Link
from engine.ranks.parts import rank_parts
from engine.ranks.rank_spec import RankSpec
from engine.ranks.segment import map_segment
from engine.ranks.stages import Stages
from engine.torch.decoder import Decoder
from engine.torch.device_tables import DeviceTables, table_width
from engine.torch.divided import LayerDone, forward_divided
from engine.torch.load import load_parameters
from engine.torch.native_decoder import make_decoder
from engine.torch.rope import make_rope
from engine.torch.step import NOT_APART, WindowedStep, pack_batch
from engine.torch.step_runner import EagerSteps, StepModel, StepRunner
from engine.torch.weights import ShardProgress


def follow(control: socket.socket, link: Link) -> None:
    """Serve as a rank until rank 0 closes its end. link: to rank 0, not yet started. Raises
    ModelError if loading fails, and any error of a step."""
    with control.makefile("rb") as stream, torch.inference_mode():
        line = stream.readline()
        if not line:  # rank 0 has refused another rank, or ended
            return
        spec = RankSpec.from_line(line)
        link.start()
        model = LoadedRank(spec)
        if spec.kv_service:
            import_module(spec.kv_service).serve(link, model.kv_pool, spec.host)
        # Before the groups are joined, so that rank 0 has the announcement when all have joined.
        link.announce_loaded()
        control.sendall(json.dumps({"digest": model.digest}).encode() + b"\n")
        backend = BACKENDS[spec.backend]()
        rank = Rank(model, backend.join(spec), backend.stages(spec))
        for command in read_commands(stream):
            rank.follow(command)


class LoadedRank:
    """A rank's part of the model and of the pools."""

    def __init__(self, spec: RankSpec) -> None:
        """Load the model. Raises ModelError."""
        torch.set_num_threads(spec.num_threads)
        if spec.torch_device.type == "cuda":
            torch.cuda.set_device(spec.torch_device)
        whole, shard = spec.config, spec.shard
        dtype = getattr(torch, spec.dtype)
        self.pools = _pools(spec)
        self.parameters, self.digest = load_parameters(
            *(Path(spec.folder), whole, dtype, spec.torch_device, _no_progress, shard, spec.stage),
            batch_invariant=spec.batch_invariant,
        )
        self.config = shard.attention_config(whole).of_layers(spec.stage.layers(whole.num_layers))
        self._spec = spec
        self.rope = make_rope(whole, spec.torch_device)

    def record(self, decoder: Decoder) -> StepRunner | None:
        """Record decode steps, while all other ranks do; None if none are to be recorded."""
        recording, device = self._spec.recording, self._spec.torch_device
        if recording is None:
            return None
        # Imported here, because it imports Triton, which is optional.
        from engine.cuda.recording import record_steps

        pool = self.pools[0]
        width = table_width(recording.max_len, pool.layout.block_size)
        tables = DeviceTables(recording.max_seqs, width, device)
        parts = StepModel(self.config, decoder, self.rope, pool)
        graphs = CudaGraphs(device) if device.type == "cuda" else CalledGraphs(device)
        eager = EagerSteps(parts, NoFollowers(), tables)
        return record_steps(
            *(recording, parts, tables, graphs, eager, NoFollowers()),
            batch_invariant=self._spec.batch_invariant,
        )

    def kv_pool(self, layout: KvLayout) -> KvPool:
        """The rank's part of the model's KV. layout: of the whole model."""
        parts = rank_parts(layout, self._spec.degrees)
        return own_kv_pool(parts[self._spec.rank], layout, self.pools)


class Rank:
    """A rank at work. Used by one thread."""

    def __init__(self, model: LoadedRank, groups: Groups, stages: Stages) -> None:
        self._model, self._context = model, groups.context
        pool_dtype = model.pools[0].tensor.dtype
        self._decoder = make_decoder(
            model.config, model.parameters, pool_dtype, groups.tensor, stages=stages
        )
        self._replayed = model.record(self._decoder)
        self._stage = stages.stage
        self._states = torch.empty(0)
        self._in_flight: deque[int] = deque()
        """Rows of each step that the first of several stages has not collected."""

    def follow(self, command: Command) -> None:
        """Execute a command."""
        match command:
            case StepCommand(replays=True) if self._replayed is not None:
                self._replayed.run(command.batch, None)
            case StepCommand():
                # Rank 0 reports the layers of other stages once it has collected a step.
                is_synced = command.syncs_layers and self._stage.is_first
                self._states = self._step(command, _meet_only if is_synced else None)
            case CollectCommand():
                self._states = self._decoder.collect(self._in_flight.popleft())
            case LogitsCommand():
                self._decoder.logits(self._states[torch.tensor(command.rows)])
            case BestCommand():
                self._decoder.best(self._states[torch.tensor(command.rows)])
            case CopyCommand():
                self._model.pools[command.pool].copy_blocks(command.sources, command.targets)

    def _step(self, command: StepCommand, layer_done: LayerDone | None) -> torch.Tensor:
        model, decoder = self._model, self._decoder
        pool, *apart = model.pools
        windowed = NOT_APART
        if apart:
            windowed = WindowedStep(command.tables, apart[0].tensor, apart[0].scales)

        def forward(
            batch: Batch, windowed: WindowedStep, layer_done: LayerDone | None
        ) -> torch.Tensor:
            packed = pack_batch(
                batch, model.config, model.rope, pool.tensor, decoder.dtype, apart=windowed
            )
            if self._stage.size > 1 and self._stage.is_first:
                self._in_flight.append(packed.num_rows)
            return decoder.forward(packed, pool.tensor, layer_done, pool.scales)

        return forward_divided(self._context, command.batch, windowed, forward, layer_done)


def _pools(spec: RankSpec) -> list[TorchKvPool]:
    """A rank's pools: in memory shared with rank 0, or its own on another node."""
    if spec.kv_fd < 0:
        return [size.own_pool(spec.rank, spec.torch_device) for size in spec.pools]
    memories, pools = pool_memories(map_segment(spec.kv_fd), spec.pools), []
    for memory, size in zip(memories, spec.pools, strict=True):
        # Each rank touches its own pages: they are allocated on its NUMA node, and no step pays for
        # page faults.
        size.memory_of(memory, spec.rank).zero_()
        pools.append(size.pool_of(memory, spec.rank))
    return pools


def _meet_only(_layer: int) -> None:
    """Ranks meet per layer; only rank 0 reports the layer."""


def _no_progress(_: ShardProgress) -> None:
    """Only rank 0 reports loading progress."""
