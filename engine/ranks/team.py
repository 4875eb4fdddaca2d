"""The processes of ranks 1, 2, ...: start, commands, supervision, shutdown."""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from baton.errors import ModelError, StartupError
from baton.types import KvLayout
from engine.interface import Batch
from engine.kv.groups.state import STATE
from engine.kv.kv_ranks import KvRanks
from engine.kv.tensors.paged import GroupedTensorPool, TorchKvPool
from engine.kv.tensors.ranks import ShardedKvPool, own_kv_pool
from engine.kv.tensors.remote_parts import RemoteParts, RemoteStates
from engine.kv.tensors.state_memory import StateMemory, state_records
from engine.ranks.backends import BACKENDS
from engine.ranks.commands import (
    StepEncoder,
    encode_best,
    encode_collect,
    encode_copy,
    encode_logits,
)
from engine.ranks.exchange import ExchangeFailed, Groups
from engine.ranks.followers import TensorPool
from engine.ranks.link import PEER_SILENT, SILENCE_S, Link
from engine.ranks.node_listener import NodeListener, RemoteRank
from engine.ranks.nodes import ONE_NODE, Nodes, files_digest
from engine.ranks.process_state import is_running
from engine.ranks.pulse import Pulse, start_pulse
from engine.ranks.rank_spec import RankSpec
from engine.ranks.segment import create_segment, map_segment
from engine.ranks.stages import OneStage, Stages

_log = logging.getLogger(__name__)

#: -P keeps the working directory out of the import path: its folders may shadow modules.
_PROGRAM = (sys.executable, "-P", "-m", "engine.follow")


def end_process(reason: str) -> None:
    """End this worker at once after the loss of a rank, as if killed; its sequences are recovered
    by other workers."""
    _log.critical("%s: this worker ends", reason)
    os._exit(1)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A running rank.

    control: connection for commands; closing it ends the rank. link: connection for a Link. ending:
    waits for the end of a rank that has closed its connections, and says how it ended. kill: end it
    now, even if it has frozen. is_running: see Link.
    """

    name: str
    control: socket.socket
    link: socket.socket
    ending: Callable[[], str]
    kill: Callable[[], None]
    is_running: Callable[[], bool] = lambda: False


def start_process(spec: RankSpec) -> RankProcess:
    """Start a rank in a new process. Raises OSError."""
    control, its_control = socket.socketpair()
    link, its_link = socket.socketpair()
    with its_control, its_link:
        process = run_rank(its_control, its_link, fds=spec.fds)
    # If the process is gone already, `wait_ready` reports it.
    with suppress(ConnectionError):
        control.sendall(spec.to_line())

    def ending() -> str:
        return f"ended with status {end(process)}"

    name = f"{spec.name} (pid {process.pid})"
    runs = partial(is_running, process.pid)
    return RankProcess(name, control, link, ending, process.kill, runs)


def run_rank(*connections: socket.socket, fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start the process of a rank over these connections: see engine.follow. fds: further ones that
    it inherits."""
    own = [each.fileno() for each in connections]
    return subprocess.Popen(
        (*_PROGRAM, *map(str, own)), stdin=subprocess.DEVNULL, pass_fds=(*own, *fds)
    )


def end(process: subprocess.Popen[bytes]) -> int:
    """Status of a rank's process with closed connections, which end it; a frozen one is killed."""
    try:
        return process.wait(SILENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def start_remote(spec: RankSpec, remote: RemoteRank) -> RankProcess:
    """Start a rank in a process that waits on another node. Raises OSError."""
    hello = remote.hello
    own = replace(spec, folder=hello.folder, host=hello.host)
    remote.control.sendall(own.to_line())
    name = f"{spec.name} on {hello.name}"
    is_running = Pulse(remote.pulse).is_running
    return RankProcess(
        *(name, remote.control, remote.link, lambda: "ended", lambda: None, is_running)
    )


class RankTeam:
    """See engine.torch.step_runner.Followers. Used by the engine's thread only."""

    def __init__(
        self,
        spec: RankSpec,
        nodes: Nodes = ONE_NODE,
        *,
        start: Callable[[RankSpec], RankProcess] = start_process,
        on_loss: Callable[[str], None] = end_process,
    ) -> None:
        """Start the other ranks of this node, and those of other nodes once all are there; they
        load while rank 0 does. Raises OSError, ConfigError, StartupError.

        spec: of rank 0; what the ranks meet by is filled in here. start: starts one rank of this
        node. on_loss: called from any thread when the ranks cannot continue.
        """
        self._on_loss = on_loss
        self._lost = threading.Event()
        self._ended: list[str] = []
        """Names of ranks that have ended."""
        self._steps = StepEncoder()
        self._num_commands = 0
        """Commands so far that have all ranks write KV."""
        self._num_followed = 0
        """Those up to the last one that copies of KV have to follow; see KvRanks."""
        degrees = spec.degrees
        self._is_on_one_node = nodes.size == 1
        is_cpu = spec.torch_device.type == "cpu"
        self._shares_kv = self._is_on_one_node and is_cpu and not spec.needs_own_kv
        self.shard = spec.shard
        self.stages: Stages = OneStage()
        remote: dict[int, RemoteRank] = {}
        if self._shares_kv:
            spec = self._with_shared_kv(spec)
        if not self._is_on_one_node:
            files = files_digest(Path(spec.folder))
            listener = NodeListener(nodes, spec.degrees, files)
            spec = replace(spec, host=listener.address[0])
            try:
                remote = listener.wait()
            except BaseException:
                listener.close()
                raise
        self._backend = BACKENDS[spec.backend]()
        self._spec = self._backend.open(spec)
        specs = [replace(self._spec, rank=rank) for rank in range(1, degrees.num_ranks)]
        self._fds = self._spec.fds
        try:
            self._members = [
                start_remote(each, remote[each.rank]) if each.rank in remote else start(each)
                for each in specs
            ]
        except BaseException:
            self._close_fds()
            raise
        self._pulses = [each.pulse for each in remote.values()]
        self._pulse = start_pulse(os.getpid(), self._pulses) if remote else None
        self._first_group = self._members[: degrees.tensor - 1]
        """The other ranks of rank 0's tensor-parallel group, which have the states of all sample
        rows."""
        self.links = [
            Link(
                member.link,
                member.name,
                on_closed=partial(self._on_closed, member),
                on_silent=partial(self._on_silent, member),
                is_running=member.is_running,
            )
            for member in self._members
        ]
        """To ranks 1, 2, ..., in that order."""
        self._is_ready = self._has_stepped = False
        for link, member in zip(self.links, self._members, strict=True):
            link.handle(PEER_SILENT, partial(self._on_peer_silent, member))
            link.start()

    def _with_shared_kv(self, spec: RankSpec) -> RankSpec:
        """The spec with memory for the KV and states of all ranks of one node."""
        kv_fd = create_segment("baton-kv", sum(spec.memory_bytes))
        *self._memories, self._states = torch.split(map_segment(kv_fd), spec.memory_bytes)
        # Touch the memory now, as each rank does with its own, so that no step pays for page
        # faults.
        for memory, pool in zip(self._memories, spec.pools, strict=True):
            pool.memory_of(memory, 0).zero_()
        return replace(spec, kv_fd=kv_fd)

    def wait_ready(self, digest: str) -> Groups:
        """See Followers. Called once."""
        for member in self._members:
            if _digest_of(member) != digest:
                raise ModelError(
                    f"{member.name} has read another checkpoint than rank 0: it changed meanwhile, "
                    "or its node has another; give all the same files"
                )
        self._is_ready = True
        if self._ended:
            raise StartupError(
                f"{self._ended[0]} ended while others loaded; its error is in the log above"
            )
        groups = self._backend.join(self._spec)
        self.stages = self._backend.stages(self._spec)
        self._close_fds()
        return groups

    def make_pool(
        self,
        layout: KvLayout,
        num_blocks: int,
        num_window_slots: int,
        num_state_slots: int,
        device: torch.device,
    ) -> ShardedKvPool | TorchKvPool | RemoteParts | GroupedTensorPool:
        numbers, sizes = itertools.count(), self._spec.pools

        def make(own: KvLayout, num_blocks: int) -> ShardedKvPool | TorchKvPool | RemoteParts:
            number = next(numbers)
            size = sizes[number]
            if not self._shares_kv:
                records: Mapping[int, StateMemory] = {}
                if (of_rank := self._spec.states_layout).num_state_layers:
                    copy_states = partial(self._copy, len(sizes))
                    own_states = RemoteStates(of_rank, num_blocks, num_state_slots, copy_states)
                    records = {STATE: own_states}
                part = size.own_pool(self._spec.rank, device, records)
                return RemoteParts(own, part, partial(self._copy, number))
            if size.num_memories == 1:
                return TorchKvPool(own, num_blocks, device, self._memories[number])
            states = state_records(own, num_blocks, num_state_slots, self._states.numpy())
            return ShardedKvPool(self._memories[number], size, own, states)

        if num_window_slots:
            return GroupedTensorPool(layout, num_blocks, num_window_slots, make)
        return make(layout, num_blocks)

    def kv_ranks(self, pool: TensorPool) -> KvRanks | None:
        if not self._spec.kv_service:
            return None
        parts = self._spec.parts
        of_all = pool.pools.values() if isinstance(pool, GroupedTensorPool) else (pool,)
        own = [each.own for each in of_all if isinstance(each, ShardedKvPool | RemoteParts)]
        table = next(iter(pool.slot_tables.values()), None)
        own_pool = own_kv_pool(parts[0], pool.layout, own, table)
        return KvRanks(parts, own_pool, self.links, lambda: self._num_followed)

    @contextmanager
    def step(
        self,
        batch: Batch,
        tables: Sequence[Sequence[int]],
        *,
        syncs_layers: bool = False,
        replays: bool = False,
    ) -> Iterator[None]:
        if not self._has_stepped:
            self._has_stepped = True
            for link in self.links:
                with suppress(OSError):  # the rank is gone: its link reports it
                    link.end_loading()
        frame = self._steps.encode(batch, tables, syncs_layers=syncs_layers, replays=replays)
        self._num_commands += 1
        if not self._spec.meets_in_steps:
            self._num_followed = self._num_commands
        with self._together(frame, self._members):
            yield

    @contextmanager
    def collect(self) -> Iterator[None]:
        with self._together(encode_collect(), self._first_group):
            yield

    @contextmanager
    def logits(self, rows: Sequence[int]) -> Iterator[None]:
        with self._together(encode_logits(rows), self._first_group):
            yield

    @contextmanager
    def best(self, rows: Sequence[int]) -> Iterator[None]:
        with self._together(encode_best(rows), self._first_group):
            yield

    def _copy(self, pool: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._num_commands += 1
        self._num_followed = self._num_commands
        with self._together(encode_copy(pool, sources, targets), self._members):
            pass

    def _close_fds(self) -> None:
        """Close what other ranks inherit. Idempotent."""
        for fd in self._fds:
            os.close(fd)
        self._fds = ()

    def close(self) -> None:
        self._close_fds()
        for link in self.links:
            link.close()
        if self._pulse is not None:
            self._pulse.kill()
            self._pulse.wait()
        for connection in self._pulses:
            connection.close()
        for member in self._members:
            member.control.close()
        for member in self._members:
            member.ending()

    @contextmanager
    def _together(self, frame: bytes, members: Sequence[RankProcess]) -> Iterator[None]:
        try:
            _send(frame, members)
            yield
        except ExchangeFailed:
            # A rank has died, or has frozen: its link names it.
            if not self._lost.wait(2 * SILENCE_S):
                self._lose("an exchange between ranks failed")
            raise
        except Exception:
            _log.exception("rank 0 failed in a step that the others take, too")
            self._lose("the ranks of the engine are apart")
            raise

    def _on_closed(self, member: RankProcess) -> None:
        self._ended.append(member.name)
        # While ranks load, `wait_ready` notices.
        if self._is_ready:
            self._lose(f"{member.name} {member.ending()}")

    def _on_silent(self, member: RankProcess, silent_s: float) -> None:
        self._lose(f"{member.name} has sent nothing for {silent_s:g} s (frozen, or out of reach)")

    def _on_peer_silent(self, member: RankProcess, what: bytes) -> None:
        self._lose(f"{member.name} {what.decode()} (frozen, or out of reach)")

    def _lose(self, reason: str) -> None:
        for member in self._members:
            member.kill()
        self._lost.set()
        self._on_loss(reason)


def _send(frame: bytes, members: Sequence[RankProcess]) -> None:
    """Send a command. Raises ExchangeFailed."""
    try:
        for member in members:
            member.control.sendall(frame)
    except OSError as error:
        raise ExchangeFailed(f"a rank takes no more commands: {error}") from error


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
