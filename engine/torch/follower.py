"""A rank other than 0: loads its part of the model and executes commands.

Protocol on the connection for commands: one line with a RankSpec; when the rank has loaded, its
answer, one line {"digest": ...}; then commands.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import torch

from engine.kv.tensors.ranks import pool_memories, rank_memory, rank_pool
from engine.ranks.backends import BACKENDS
from engine.ranks.commands import LogitsCommand, StepCommand, read_commands
from engine.ranks.exchange import Ranks
from engine.ranks.link import Link
from engine.ranks.rank_spec import RankSpec
from engine.ranks.segment import map_segment
from engine.torch.decoder import Decoder
from engine.torch.load import load_parameters
from engine.torch.rope import make_rope
from engine.torch.step import NOT_APART, WindowedStep, pack_batch
from engine.torch.weights import ShardProgress


def follow(control: socket.socket, link: Link) -> None:
    """Serve as a rank until rank 0 closes its end. link: to rank 0, not yet started. Raises
    ModelError if loading fails, and any error of a step."""
    with control.makefile("rb") as stream, torch.inference_mode():
        spec = RankSpec.from_line(stream.readline())
        link.start()
        model = LoadedRank(spec)
        control.sendall(json.dumps({"digest": model.digest}).encode() + b"\n")
        rank = Rank(model, BACKENDS[spec.backend]().join(spec))
        for command in read_commands(stream):
            rank.follow(command)


class LoadedRank:
    """A rank's part of the model and of the pools."""

    def __init__(self, spec: RankSpec) -> None:
        """Load the model. Raises ModelError."""
        torch.set_num_threads(spec.num_threads)
        whole, shard = spec.config, spec.shard
        dtype = getattr(torch, spec.dtype)
        memories = pool_memories(map_segment(spec.kv_fd), spec.pools, spec.degrees.num_ranks)
        self.pools = []
        for memory, pool in zip(memories, spec.pools, strict=True):
            # Each rank touches its own pages: they are allocated on its NUMA node, and no step pays
            # for page faults.
            rank_memory(memory, pool.layout, pool.num_blocks, shard).zero_()
            self.pools.append(rank_pool(memory, pool.layout, pool.num_blocks, shard))
        self.parameters, self.digest = load_parameters(
            Path(spec.folder), whole, dtype, spec.torch_device, _no_progress, shard
        )
        self.config = shard.attention_config(whole)
        self.rope = make_rope(whole, spec.max_model_len, spec.torch_device)


class Rank:
    """A rank at work. Used by one thread."""

    def __init__(self, model: LoadedRank, ranks: Ranks) -> None:
        self._model = model
        self._decoder = Decoder(model.config, model.parameters, ranks)
        self._states = torch.empty(0)

    def follow(self, command: StepCommand | LogitsCommand) -> None:
        """Execute a command."""
        if isinstance(command, LogitsCommand):
            self._decoder.logits(self._states[torch.tensor(command.rows)])
        else:
            self._states = self._step(command, _meet_only if command.syncs_layers else None)

    def _step(self, command: StepCommand, layer_done: Callable[[int], None] | None) -> torch.Tensor:
        model, decoder = self._model, self._decoder
        pool, *apart = model.pools
        windowed = NOT_APART
        if apart:
            windowed = WindowedStep(command.tables, apart[0].tensor, apart[0].scales)
        packed = pack_batch(
            command.batch, model.config, model.rope, pool.tensor, decoder.dtype, apart=windowed
        )
        return decoder.forward(packed, pool.tensor, layer_done, pool.scales)


def _meet_only(_layer: int) -> None:
    """Ranks meet per layer; only rank 0 reports the layer."""


def _no_progress(_: ShardProgress) -> None:
    """Only rank 0 reports loading progress."""
