"""Ranks over torch.distributed: gloo between CPUs, of one host or several; NCCL between GPUs.

Process groups are made from a store, without torch.distributed's default group, so that several
engines, and ranks that are threads, may be in one process.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)

from baton.errors import StartupError
from engine.ranks.exchange import (
    Alone,
    ExchangeFailed,
    Groups,
    Ranks,
    shared_sum,
    shares_sum,
    sum_of,
)
from engine.ranks.mesh import Stage
from engine.ranks.rank_spec import RankSpec
from engine.ranks.stages import OneStage, Stages
from engine.shard import Shard

#: Deadline for the other ranks, which have loaded, to join a group.
_JOIN = timedelta(seconds=60)
#: Deadline of an exchange, in which all ranks are at the same place of a step. Only a network that
#: is down between two ranks, and not between each and rank 0, lets it pass: else links are first.
_EXCHANGE = timedelta(seconds=60)
#: Deadline of states from another stage, which computes a whole step in the meantime.
_STAGE = timedelta(minutes=30)


class ProcessGroups:
    """See Backend. Ranks find each other by a store of rank 0's process."""

    def __init__(self, kind: str) -> None:
        """kind: gloo or nccl."""
        self._kind = kind
        self._server: TCPStore | None = None

    def open(self, spec: RankSpec) -> RankSpec:
        # The store would listen on all addresses.
        listener = socket.create_server((spec.host, 0))
        port = listener.getsockname()[1]
        self._server = TCPStore(
            spec.host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_JOIN,
            master_listen_fd=listener.detach(),
        )
        return replace(spec, store=(spec.host, port))

    def join(self, spec: RankSpec) -> Groups:
        def ranks(name: str, members: Sequence[int], shard: Shard) -> Ranks:
            if len(members) == 1:
                return Alone()
            group = self.join_group(spec, name, members)
            return _RANKS[self._kind](group, shard, spec.torch_device)

        tensor, context = spec.degrees.groups_of(spec.rank)
        return Groups(
            ranks("tensor", tensor, spec.shard), ranks("context", context, spec.context_shard)
        )

    def stages(self, spec: RankSpec) -> Stages:
        if spec.degrees.pipeline == 1:
            return OneStage()
        # A group for each link: NCCL runs what two ranks of one group exchange in order, and the
        # only link back to the first of two stages would wait for states on the way there.
        ring, links = spec.pipeline, dict[int, ProcessGroup]()
        stage, size = spec.place.stage, len(spec.pipeline)
        for number in sorted({stage, (stage - 1) % size}):  # all ranks in one order
            members = (ring[number], ring[(number + 1) % size])
            links[number] = self.join_group(spec, "link", members)
            links[number].set_timeout(_STAGE)
        return GroupStages(links[stage], links[(stage - 1) % size], spec.stage, spec.torch_device)

    def join_group(self, spec: RankSpec, name: str, members: Sequence[int]) -> ProcessGroup:
        """The group of the ranks `members`, which include this one, in that order. Waits until all
        have joined. name: of this kind of group. Raises StartupError."""
        host, port = spec.store
        try:
            shared = TCPStore(host, port, is_master=False, timeout=_JOIN)
            store = PrefixStore(f"{name}-{members[0]}", shared)
            return _MAKERS[self._kind](store, members.index(spec.rank), len(members), spec)
        except RuntimeError as error:  # torch raises no narrower type
            raise StartupError(
                f"{spec.name} found no other ranks of its {name} group {tuple(members)} by "
                f"{host}:{port} within {_JOIN.seconds} s: {error}"
            ) from error


def _gloo(store: Store, rank: int, size: int, spec: RankSpec) -> ProcessGroup:
    # Without options gloo listens on the address of the host's name. Their names are as in
    # torch.distributed's own init_process_group.
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=spec.host)]
    options._timeout = _JOIN
    backend = ProcessGroupGloo(store, rank, size, options)
    group = ProcessGroup(store, rank, size)
    kind = ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    group.set_timeout(_EXCHANGE)
    return group


def _nccl(store: Store, rank: int, size: int, spec: RankSpec) -> ProcessGroup:
    # Only builds of torch for CUDA have it.
    from torch.distributed import ProcessGroupNCCL

    backend = ProcessGroupNCCL(store, rank, size, ProcessGroupNCCL.Options())
    group = ProcessGroup(store, rank, size)
    kind = ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    group._register_backend(spec.torch_device, kind, backend)
    return group


_MAKERS = {"gloo": _gloo, "nccl": _nccl}


@contextmanager
def _exchange() -> Iterator[None]:
    """Raise ExchangeFailed if the body's exchange fails: gloo notices a closed connection at the
    start of an exchange, or while that is waited for. On a GPU the device's stream alone waits."""
    try:
        yield
    except RuntimeError as error:  # torch raises no narrower type
        raise ExchangeFailed(f"an exchange between ranks failed: {error}") from error


class GroupStages:
    """See engine.ranks.stages.Stages."""

    def __init__(
        self, following: ProcessGroup, preceding: ProcessGroup, stage: Stage, device: torch.device
    ) -> None:
        """following: this stage and the next. preceding: the previous one and this. device: of the
        tensors."""
        self.stage = stage
        self._following, self._preceding = following, preceding
        self._token = torch.zeros(1, device=device)
        self._sent: deque[tuple[Work, torch.Tensor]] = deque()
        """Messages that may still be read."""

    def send(self, states: torch.Tensor) -> None:
        if len(self._sent) == self.stage.size:
            # As many launches as stages are under way, so that this one is over.
            with _exchange():
                self._sent.popleft()[0].wait()
        message = self._message(states)
        with _exchange():
            self._sent.append((self._following.send([message], 1, 0), message))

    def receive(self, states: torch.Tensor) -> None:
        with _exchange():
            self._preceding.recv([self._message(states)], 0, 0).wait()

    def _message(self, states: torch.Tensor) -> torch.Tensor:
        """States without rows have to arrive, too."""
        return states if len(states) else self._token


class ProcessGroupRanks:
    """See engine.ranks.exchange.Ranks."""

    def __init__(self, group: ProcessGroup, shard: Shard, device: torch.device) -> None:
        """group: of the tensor-parallel ranks. device: of the tensors."""
        self.shard = shard
        self._group = group
        self._token = torch.zeros(1, device=device)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        columns = self.shard.part(whole.shape[1])
        return whole[:, columns.start : columns.stop]

    def meet(self) -> None:
        # Unlike ProcessGroup.barrier, ordered on the device's stream.
        with _exchange():
            self._group.allreduce([self._token]).wait()

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        (rows, columns), size = part.shape, self.shard.size
        if not rows:
            self.meet()
            return part.new_empty(0, size * columns)
        return self._stacked(part).transpose(0, 1).reshape(rows, size * columns)

    def gather_first(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        rows, size = len(part), self.shard.size
        if not rows:
            return part.new_empty(0, num_columns) if self.shard.rank == 0 else part
        widths = [len(Shard(rank, size).part(num_columns)) for rank in range(size)]
        # Parts of one exchange have equal shapes; the last ones may be narrower.
        padded = part.new_empty(rows, widths[0])
        padded[:, : part.shape[1]] = part
        is_first = self.shard.rank == 0
        parts = [torch.empty_like(padded) for _ in widths] if is_first else []
        with _exchange():
            self._group.gather(parts, padded, 0).wait()
        if not is_first:
            return part
        return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], 1)

    def reduce(self, part: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if shares_sum(part, self.shard.size):
            return shared_sum(self, part, residual)
        if not len(part):
            self.meet()
            return part
        return sum_of(self._stacked(part).unbind(), residual)

    def _stacked(self, part: torch.Tensor) -> torch.Tensor:
        """part [rows, columns], at least one row -> [ranks, rows, columns]."""
        (rows, columns), size = part.shape, self.shard.size
        stacked = part.new_empty(size * rows, columns)
        with _exchange():
            self._group._allgather_base(stacked, part.contiguous()).wait()
        return stacked.view(size, rows, columns)

    def exchange(self, part: torch.Tensor, num_rows: Sequence[int]) -> torch.Tensor:
        (rows, columns), size = part.shape, self.shard.size
        sent = part.view(rows, size, columns // size).transpose(0, 1).flatten(0, 1)
        received = part.new_empty(sum(num_rows), columns // size)
        splits = list(num_rows), [rows] * size
        with _exchange():
            self._group.alltoall_base(received, sent.contiguous(), *splits).wait()
        return received

    def send_rows(self, rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        own = self.shard.rank
        from_each = [row[own] for row in counts]
        received = rows.new_empty(sum(from_each), rows.shape[1])
        with _exchange():
            self._group.alltoall_base(
                received, rows.contiguous(), from_each, list(counts[own])
            ).wait()
        return received


class NcclRanks(ProcessGroupRanks):
    """See engine.ranks.exchange.Ranks. Sums are NCCL's, in the parts' dtype."""

    def reduce(self, part: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if not len(part):
            self.meet()
            return part
        total = part.contiguous()
        with _exchange():
            self._group.allreduce([total]).wait()
        return total if residual is None else total.add_(residual)


_RANKS = {"gloo": ProcessGroupRanks, "nccl": NcclRanks}
