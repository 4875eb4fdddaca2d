"""Registry of `baton serve`: the supervisor writes each ready worker's address to a pipe."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable
from typing import NoReturn

from baton.errors import ConfigError
from baton.registry.interface import Change, WorkerAdded, WorkerRemoved
from baton.registry.registration import Registration
from baton.types import Tier


class PipeRegistry:
    """Reads addresses from a descriptor, which it owns, until the other end is closed. A line says
    that a worker is there, that it leaves ("removed"), or that all that start first are listed
    ("complete")."""

    def __init__(self, fd: int) -> None:
        """Raises ConfigError if the descriptor is not open."""
        try:
            self._fd = os.dup(fd)
        except OSError as error:
            fix = f"{error.strerror}; leave it out, or pass the descriptor on to this process"
            raise ConfigError.of("workers_fd", fd, fix) from error
        # The descriptor may be the standard input, which must stay occupied; see
        # occupy_standard_streams.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, fd)
        os.close(nothing)
        self._complete = asyncio.Event()

    async def changes(self) -> AsyncGenerator[Change, None]:
        """See Registry."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._fd, "rb", 0)
        )
        try:
            while line := await reader.readline():
                entry = json.loads(line)
                if entry.get("complete"):
                    self._complete.set()
                elif entry.get("removed"):
                    yield WorkerRemoved(entry["address"])
                else:
                    yield WorkerAdded(entry["address"], Tier[entry["tier"].upper()])
        finally:
            transport.close()
            self._complete.set()

    async def wait_complete(self) -> None:
        """Wait until `changes` has yielded all workers that start first."""
        await self._complete.wait()

    async def announce(self, current: Callable[[], Registration | None]) -> NoReturn:  # noqa: ARG002
        """See Registry."""
        await asyncio.get_running_loop().create_future()
        raise RuntimeError("nobody sets that future")
