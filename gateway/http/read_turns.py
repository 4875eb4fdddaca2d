"""Bounds what the event loop reads of long requests, over all connections of a server."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from itertools import islice
from typing import Protocol

#: Maximum bytes per slice, but for the piece that exceeds it; and the slice, in seconds. The loop
#: reads from a fast client up to 32 times in a row, 256 KiB each.
SLICE_BYTES, SLICE_S = 2**20, 0.005

#: Paused connections that read at a time: their pieces fit into a slice.
NUM_RESUMED = 4


class Reader(Protocol):
    """A connection. Both calls are ignored once it is closing."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class ReadTurns:
    """Connections with a request that has begun and not ended, or is discarded after a refusal.

    Once a slice's bytes are read, all of them pause. They resume in turn, a few at a time, and
    each reads one piece while others wait. Clients that send nothing keep no others waiting.
    Requests that arrive in one piece are not counted.
    """

    def __init__(self) -> None:
        self._left_bytes = SLICE_BYTES
        self._reading: dict[Reader, None] = {}
        """In the order in which they resumed."""
        self._paused: OrderedDict[Reader, None] = OrderedDict()
        """In the order in which they resume."""
        self._batch: set[Reader] = set()
        """Resumed last, and not read since."""
        self._timer: asyncio.TimerHandle | None = None
        """End of the slice; None if nothing was read in it and nobody waits."""

    def count(self, reader: Reader, num_bytes: int) -> None:
        """Count bytes of a request that goes on."""
        if reader not in self._paused:
            self._reading[reader] = None
        self._left_bytes -= num_bytes
        if self._left_bytes <= 0:
            waiting = [each for each in self._reading if each is not reader]
            for each in [*self._reading]:
                self._pause(each)
            for each in reversed(waiting):  # it is still their turn
                self._paused.move_to_end(each, last=False)
        elif self._paused and reader in self._reading:
            self._pause(reader)
            if not self._batch:  # short pieces have not used up the slice
                self._resume_batch()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SLICE_S, self._begin_slice)

    def leave(self, reader: Reader) -> None:
        """Forget a reader: its request is complete, or its connection closed."""
        self._reading.pop(reader, None)
        self._batch.discard(reader)
        if reader in self._paused:
            self._resume(reader)
            del self._reading[reader]

    def _begin_slice(self) -> None:
        self._left_bytes = SLICE_BYTES
        self._resume_batch()
        self._timer = None
        if self._paused:
            self._timer = asyncio.get_running_loop().call_later(SLICE_S, self._begin_slice)

    def _resume_batch(self) -> None:
        self._batch = {*islice(self._paused, NUM_RESUMED)}
        for reader in [*islice(self._paused, NUM_RESUMED)]:
            self._resume(reader)

    def _pause(self, reader: Reader) -> None:
        self._batch.discard(reader)
        del self._reading[reader]
        self._paused[reader] = None
        reader.pause_reading()

    def _resume(self, reader: Reader) -> None:
        del self._paused[reader]
        self._reading[reader] = None
        reader.resume_reading()
