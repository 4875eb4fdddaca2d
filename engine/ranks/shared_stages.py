"""Links between stages on one host: a ring buffer of rows in shared memory for each rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from engine.ranks.mesh import Stage
from engine.ranks.semaphores import Semaphore, semaphores_bytes

#: Semaphores of a ring: a message has been written; one has been read.
_NUM_SEMAPHORES = 2


def ring_bytes(num_rows: int, row_bytes: int) -> int:
    """Bytes of a ring that holds so many rows."""
    return semaphores_bytes(_NUM_SEMAPHORES) + -(-num_rows * row_bytes // 4096) * 4096


def prepare_ring(memory: torch.Tensor) -> None:
    """Initialise a ring, once, before any rank uses it. Raises OSError."""
    for index in range(_NUM_SEMAPHORES):
        Semaphore(memory, index).prepare()


class RowRing:
    """One end of a link between two stages, used by one thread. Messages of more rows than the
    ring holds go in pieces."""

    def __init__(self, memory: torch.Tensor, row_bytes: int) -> None:
        """memory: ring_bytes of uint8, prepared, shared by both ends."""
        self._memory = memory  # keep alive: semaphores are used by address
        self._written, self._read = (Semaphore(memory, i) for i in range(_NUM_SEMAPHORES))
        rows = memory[semaphores_bytes(_NUM_SEMAPHORES) :]
        self._num_rows = len(rows) // row_bytes
        self._rows = rows[: self._num_rows * row_bytes].view(self._num_rows, row_bytes)
        self._at = 0
        self._unread: deque[int] = deque()
        """Rows of each piece that the receiver may not have read."""

    def send(self, states: torch.Tensor) -> None:
        for piece in self._pieces(states):
            while sum(self._unread) + len(piece) > self._num_rows:
                self._read.wait()
                self._unread.popleft()
            for ours, theirs in self._places(piece):
                theirs.copy_(ours)
            self._unread.append(len(piece))
            self._written.post()

    def receive(self, states: torch.Tensor) -> None:
        for piece in self._pieces(states):
            self._written.wait()
            for ours, theirs in self._places(piece):
                ours.copy_(theirs)
            self._read.post()

    def _pieces(self, states: torch.Tensor) -> Iterator[torch.Tensor]:
        """Rows that fit the ring, as bytes; at least one piece, so that an empty message arrives,
        too."""
        rows = states.view(torch.uint8)
        for first in range(0, max(len(rows), 1), self._num_rows):
            yield rows[first : first + self._num_rows]

    def _places(self, piece: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(rows of the piece, their places in the ring), up to its end and from its start."""
        at, num_before_end = self._at, self._num_rows - self._at
        self._at = (at + len(piece)) % self._num_rows
        for rows, first in ((piece[:num_before_end], at), (piece[num_before_end:], 0)):
            if len(rows):
                yield rows, self._rows[first : first + len(rows)]


class SharedStages:
    """See engine.ranks.stages.Stages."""

    def __init__(self, stage: Stage, to_next: RowRing, from_previous: RowRing) -> None:
        self.stage = stage
        self.send, self.receive = to_next.send, from_previous.receive
