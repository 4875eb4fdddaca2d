"""The processes of ranks 1, 2, ...: start, commands, supervision, shutdown."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from baton.errors import ModelError, StartupError
from baton.types import KvLayout
from engine.interface import Batch
from engine.kv.tensors.paged import GroupedTensorPool
from engine.kv.tensors.ranks import (
    ShardedKvPool,
    pool_bytes,
    pool_memories,
    rank_memory,
)
from engine.ranks.backends import BACKENDS
from engine.ranks.commands import encode_logits, encode_step
from engine.ranks.exchange import Ranks
from engine.ranks.rank_spec import RankSpec
from engine.ranks.segment import create_segment, map_segment

_log = logging.getLogger(__name__)

#: -P keeps the working directory out of the import path: its folders may shadow modules.
_PROGRAM = (sys.executable, "-P", "-m", "engine.torch.follow")


def end_process(reason: str) -> None:
    """End this worker at once after the loss of a rank, as if killed; its sequences are recovered
    by other workers."""
    _log.critical("%s: this worker ends", reason)
    os._exit(1)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A running rank. control: socket to it; closing it ends the rank. wait: waits for its end and
    returns its exit status."""

    name: str
    control: socket.socket
    wait: Callable[[], int]


def start_process(spec: RankSpec) -> RankProcess:
    """Start a rank in a new process. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            (*_PROGRAM, str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *spec.fds),
        )
    # If the process is gone already, `wait_ready` reports it.
    with suppress(ConnectionError):
        ours.sendall(spec.to_line())
    return RankProcess(f"{spec.name} (pid {process.pid})", ours, process.wait)


class RankTeam:
    """See engine.torch.step_runner.Followers. Used by the engine's thread only."""

    def __init__(
        self,
        spec: RankSpec,
        *,
        start: Callable[[RankSpec], RankProcess] = start_process,
        on_loss: Callable[[str], None] = end_process,
    ) -> None:
        """Start the other ranks; they load while rank 0 does. Raises OSError.

        spec: of rank 0; file descriptors are filled in here. start: starts one rank. on_loss:
        called from any thread when the ranks cannot continue.
        """
        self._on_loss = on_loss
        self._is_closing = threading.Event()
        self._size = spec.degrees.num_ranks
        sizes = [pool_bytes(pool.layout, pool.num_blocks, self._size) for pool in spec.pools]
        kv_fd = create_segment("baton-kv", sum(sizes))
        self._memories = pool_memories(map_segment(kv_fd), spec.pools, self._size)
        self._backend = BACKENDS[spec.backend]()
        self._spec = self._backend.open(replace(spec, kv_fd=kv_fd))
        self.shard = spec.shard
        self._members = [start(replace(self._spec, rank=rank)) for rank in range(1, self._size)]
        self._watchers = [
            threading.Thread(target=self._watch, args=(m,), name=m.name, daemon=True)
            for m in self._members
        ]
        # Touch the memory now, as each rank does with its own, so that no step pays for page
        # faults.
        for memory, pool in zip(self._memories, spec.pools, strict=True):
            rank_memory(memory, pool.layout, pool.num_blocks, spec.shard).zero_()

    def wait_ready(self, digest: str) -> Ranks:
        """See Followers. They are watched from then on. Called once."""
        for member in self._members:
            if _digest_of(member) != digest:
                raise ModelError("the checkpoint changed while it was read; start again")
        for watcher in self._watchers:
            watcher.start()
        ranks = self._backend.join(self._spec)
        for fd in self._spec.fds:
            os.close(fd)
        return ranks

    def make_pool(
        self,
        layout: KvLayout,
        num_blocks: int,
        num_window_slots: int,
        device: torch.device,  # noqa: ARG002
    ) -> ShardedKvPool | GroupedTensorPool:
        memories, size = iter(self._memories), self._size

        def make(own: KvLayout, count: int) -> ShardedKvPool:
            return ShardedKvPool(next(memories), own, count, size)

        if num_window_slots:
            return GroupedTensorPool(layout, num_blocks, num_window_slots, make)
        return make(layout, num_blocks)

    @contextmanager
    def step(
        self, batch: Batch, tables: Sequence[Sequence[int]], *, syncs_layers: bool
    ) -> Iterator[None]:
        with self._together(encode_step(batch, tables, syncs_layers=syncs_layers)):
            yield

    @contextmanager
    def logits(self, rows: Sequence[int]) -> Iterator[None]:
        with self._together(encode_logits(rows)):
            yield

    def close(self) -> None:
        self._is_closing.set()
        for member in self._members:
            member.control.close()
        for member in self._members:
            member.wait()
        for watcher in self._watchers:
            if watcher.ident is not None:
                watcher.join()

    @contextmanager
    def _together(self, frame: bytes) -> Iterator[None]:
        try:
            for member in self._members:
                member.control.sendall(frame)
            yield
        except Exception:
            _log.exception("rank 0 failed in a step that the others take, too")
            self._on_loss("the ranks of the engine are apart")
            raise

    def _watch(self, member: RankProcess) -> None:
        status = member.wait()
        if not self._is_closing.is_set():
            self._on_loss(f"{member.name} ended with status {status}")


def _digest_of(member: RankProcess) -> str:
    """Digest reported by a rank once it has loaded. Raises StartupError if it ends first."""
    line = b""
    with suppress(ConnectionError), member.control.makefile("rb") as stream:
        line = stream.readline()
    if not line:
        raise StartupError(
            f"{member.name} ended before it had loaded its part of the model; its error is in the "
            "log above"
        )
    digest: str = json.loads(line)["digest"]
    return digest
