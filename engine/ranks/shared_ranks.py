"""Synchronisation and data exchange of ranks on one host: semaphores and staging areas in shared
memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.ranks.exchange import Alone, Groups, Ranks, shared_sum, shares_sum, sum_of
from engine.ranks.rank_spec import RankSpec
from engine.ranks.segment import create_segment, map_segment
from engine.ranks.semaphores import Semaphore, semaphores_bytes
from engine.ranks.shared_stages import RowRing, SharedStages, prepare_ring, ring_bytes
from engine.ranks.stages import OneStage, Stages
from engine.shard import Shard

#: Two areas, because a rank may be one exchange ahead of the slowest, which still reads the last
#: one.
_NUM_AREAS = 2


def segment_bytes(size: int, staging_bytes: int) -> int:
    """Bytes of shared memory for SharedRanks of `size` ranks."""
    return semaphores_bytes(size * size) + _NUM_AREAS * size * staging_bytes


def prepare(memory: torch.Tensor, size: int) -> None:
    """Initialise the semaphores, once, before any rank uses `memory`. Raises OSError."""
    for index in range(size * size):
        Semaphore(memory, index).prepare()


class SharedMemory:
    """See engine.ranks.backends.Backend. Groups, and each rank's ring to the next stage, lie side
    by side in one segment."""

    def open(self, spec: RankSpec) -> RankSpec:
        group_sizes, ring_sizes = _sizes(spec)
        fd = create_segment("baton-ranks", sum(group_sizes.values()) + sum(ring_sizes))
        groups, rings = _split(fd, spec)
        for members, memory in groups.items():
            prepare(memory, len(members))
        for memory in rings:
            prepare_ring(memory)
        return replace(spec, meeting_fd=fd)

    def join(self, spec: RankSpec) -> Groups:
        memories, _ = _split(spec.meeting_fd, spec)

        def ranks(members: tuple[int, ...], shard: Shard) -> Ranks:
            if len(members) == 1:
                return Alone()
            return SharedRanks(memories[members], shard, spec.staging_bytes)

        tensor, context = spec.degrees.groups_of(spec.rank)
        return Groups(ranks(tensor, spec.shard), ranks(context, spec.context_shard))

    def stages(self, spec: RankSpec) -> Stages:
        if spec.degrees.pipeline == 1:
            return OneStage()
        _, rings = _split(spec.meeting_fd, spec)
        to_next, from_previous = (
            RowRing(rings[rank], spec.state_bytes) for rank in (spec.rank, spec.previous_rank)
        )
        return SharedStages(spec.stage, to_next, from_previous)


def _sizes(spec: RankSpec) -> tuple[dict[tuple[int, ...], int], list[int]]:
    """Bytes of each group of several ranks, by these, and of each ring."""
    degrees = spec.degrees
    groups = {
        members: segment_bytes(len(members), spec.staging_bytes)
        for members in (*degrees.tensor_groups(), *degrees.context_groups())
        if len(members) > 1
    }
    num_rings = degrees.num_ranks if degrees.pipeline > 1 else 0
    ring = ring_bytes(spec.max_num_rows, spec.state_bytes)
    return groups, [ring] * num_rings


def _split(
    fd: int, spec: RankSpec
) -> tuple[dict[tuple[int, ...], torch.Tensor], Sequence[torch.Tensor]]:
    """The memory of each group of several ranks, and of each rank's ring to the next stage."""
    groups, rings = _sizes(spec)
    memories = torch.split(map_segment(fd), [*groups.values(), *rings])
    return dict(zip(groups, memories, strict=False)), memories[len(groups) :]


class SharedRanks:
    """See engine.ranks.exchange.Ranks. Used by one thread of each process.

    Each ordered pair of ranks has a semaphore. An arriving rank posts its semaphores to all others
    and waits for theirs; counting per pair keeps a fast rank from being counted in place of a slow
    one. There is no deadline: the starter of the ranks ends all of them if one dies.
    """

    def __init__(self, memory: torch.Tensor, shard: Shard, staging_bytes: int) -> None:
        """memory: segment_bytes of uint8, prepared, shared by all ranks. staging_bytes: bytes for a
        rank's part of a row."""
        self.shard = shard
        size, first = shard.size, semaphores_bytes(shard.size**2)
        self._memory = memory  # keep alive: semaphores are used by address
        self._staging = memory[first:].view(_NUM_AREAS, size, staging_bytes)
        self._staging_bytes = staging_bytes
        self._area = 0
        others = [rank for rank in range(size) if rank != shard.rank]
        self._towards = [self._semaphore(shard.rank, other) for other in others]
        self._from = [self._semaphore(other, shard.rank) for other in others]

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        columns = self.shard.part(whole.shape[1])
        return whole[:, columns.start : columns.stop]

    def meet(self) -> None:
        for semaphore in self._towards:
            semaphore.post()
        for semaphore in self._from:
            semaphore.wait()

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        rows, columns = part.shape
        whole = part.new_empty(rows, self.shard.size * columns)
        for first in self._pieces(rows, columns, part.element_size()):
            self._put(part, first)
            self.meet()
            self._take(whole, first, [columns] * self.shard.size)
        return whole

    def gather_first(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        size, is_first = self.shard.size, self.shard.rank == 0
        columns = [len(Shard(rank, size).part(num_columns)) for rank in range(size)]
        whole = part.new_empty(part.shape[0], num_columns) if is_first else part
        for first in self._pieces(part.shape[0], columns[0], part.element_size()):
            self._put(part, first)
            self.meet()
            if is_first:
                self._take(whole, first, columns)
        return whole

    def reduce(self, part: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        (rows, columns), size = part.shape, self.shard.size
        if shares_sum(part, size):
            return shared_sum(self, part, residual)
        whole = torch.empty_like(part)
        for piece in self._pieces(rows, columns, part.element_size()):
            self._put(part, piece)
            self.meet()
            num_rows = len(whole[piece])
            parts = [self._staged(rank, num_rows, columns, part.dtype) for rank in range(size)]
            whole[piece] = sum_of(parts, None if residual is None else residual[piece])
        return whole

    def exchange(self, part: torch.Tensor, num_rows: Sequence[int]) -> torch.Tensor:
        own = self.shard.part(part.shape[1])
        whole = part.new_empty(sum(num_rows), len(own))
        for first in self._pieces(max(num_rows), part.shape[1], part.element_size()):
            self._put(part, first)
            self.meet()
            for rank, rows in enumerate(torch.split(whole, list(num_rows))):
                piece = rows[first]
                staged = self._staged(rank, len(piece), part.shape[1], part.dtype)
                piece.copy_(staged[:, own.start : own.stop])
        return whole

    def send_rows(self, rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        own, columns = self.shard.rank, rows.shape[1]
        received = rows.new_empty(sum(row[own] for row in counts), columns)
        for piece in self._pieces(max(map(sum, counts)), columns, rows.element_size()):
            self._put(rows, piece)
            self.meet()
            at = 0
            for sender, row in enumerate(counts):
                # Rows of this sender for this rank, among all that it sends.
                first = sum(row[:own])
                start, end = max(first, piece.start), min(first + row[own], piece.stop, sum(row))
                if start < end:
                    staged = self._staged(sender, end - piece.start, columns, rows.dtype)
                    to = at + start - first
                    received[to : to + end - start] = staged[start - piece.start :]
                at += row[own]
        return received

    def _pieces(self, rows: int, columns: int, element_bytes: int) -> Sequence[slice]:
        """Ranges of rows that fit the staging area; at least one, so that ranks meet."""
        step = self._staging_bytes // (columns * element_bytes)
        return [slice(i, min(i + step, rows)) for i in range(0, max(rows, 1), step)]

    def _put(self, part: torch.Tensor, rows: slice) -> None:
        """Write to this rank's staging area of the next exchange."""
        self._area = (self._area + 1) % _NUM_AREAS
        piece = part[rows]
        self._staged(self.shard.rank, piece.shape[0], piece.shape[1], part.dtype).copy_(piece)

    def _take(self, whole: torch.Tensor, rows: slice, columns: Sequence[int]) -> None:
        """Read the parts of all ranks, side by side."""
        target = whole[rows]
        parts = [
            self._staged(rank, target.shape[0], width, whole.dtype)
            for rank, width in enumerate(columns)
        ]
        torch.cat(parts, dim=1, out=target)

    def _staged(self, rank: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = rows * columns * dtype.itemsize
        return self._staging[self._area, rank, :num_bytes].view(dtype).view(rows, columns)

    def _semaphore(self, by: int, to: int) -> Semaphore:
        return Semaphore(self._memory, by * self.shard.size + to)
