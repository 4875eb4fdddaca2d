"""A sender's connection that packs into numbered slots of memory: which are free, and which the
receiver has."""

from __future__ import annotations

import socket
from abc import abstractmethod
from typing import Protocol

from kv_transfer.frame import FrameError
from kv_transfer.transport.base import Staged
from kv_transfer.transport.stream_connection import StreamConnection


class SlotMemory(Protocol):
    """Memory that is cut into slots."""

    def staged(self, index: int, num_bytes: int) -> Staged:
        """The first bytes of a slot, writable."""
        ...


class SlottedConnection(StreamConnection):
    """A slot is the sender's but between the sending of a chunk and its credit. Payloads do not
    travel on the socket."""

    def __init__(self, sock: socket.socket, send_timeout_s: float) -> None:
        super().__init__(sock, send_timeout_s)
        self._free: list[int] = []
        self._in_flight: set[int] = set()

    @property
    @abstractmethod
    def memory(self) -> SlotMemory | None:
        """The slots' memory; None before the receiver's acceptance and after the end."""

    def open_slots(self, num_slots: int) -> None:
        """The memory is there, and all its slots are free."""
        self._free = list(range(num_slots))

    def stage(self, num_bytes: int) -> Staged | None:
        memory = self.memory
        if not self._free or memory is None:
            return None
        slot = self._free.pop()
        self._in_flight.add(slot)
        return memory.staged(slot, num_bytes)

    def unstage(self, staged: Staged) -> None:
        self.take_back([staged.slot])

    def take_back(self, slots: list[int]) -> None:
        for slot in slots:
            if slot not in self._in_flight:
                raise FrameError(f"the receiver gives back slot {slot}, which is not in use")
            self._in_flight.remove(slot)
            self._free.append(slot)

    def payload_of(self, staged: Staged | None) -> tuple[memoryview, ...]:
        del staged
        return ()
