"""Peers' HTTP servers, in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.drive_http import COMPLETIONS, Dialect
from bench.machine import forced_level, level_environment
from bench.peers.processes import ContenderFailed

#: How long a server may take to end by itself, in seconds.
_END_S = 30.0
#: Bytes of the longest line of a log.
_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PeerServer:
    """ready: part of the line that its log has when it answers."""

    command: Sequence[str]
    environment: Mapping[str, str]
    port: int
    ready: str
    dialect: Dialect = COMPLETIONS

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What every server keeps to. kv_bytes: of all its workers together."""

    num_threads: int
    max_model_len: int
    max_num_seqs: int
    kv_bytes: int


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@asynccontextmanager
async def running(server: PeerServer) -> AsyncIterator[str]:
    """The server while it answers; yields its address. Raises ContenderFailed with its last line
    if it ends before."""
    process = await asyncio.create_subprocess_exec(
        *server.command,
        env={**level_environment(forced_level()), **server.environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=_LINE_BYTES,
        start_new_session=True,
    )
    reading = None
    try:
        if process.stdout is None:
            raise ContenderFailed("it has no pipe")
        await _ready(process.stdout, server.ready)
        # A full pipe would stop the server.
        reading = asyncio.create_task(_discard(process.stdout))
        yield server.address
    finally:
        await _end(process)
        if reading is not None:
            await reading


async def _ready(log: asyncio.StreamReader, mark: str) -> None:
    last = ""
    while line := await log.readline():
        last = line.decode(errors="replace").strip() or last
        if mark in last:
            return
    raise ContenderFailed(last or "it ended without a word")


async def _discard(log: asyncio.StreamReader) -> None:
    while await log.read(_LINE_BYTES):
        pass


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the server, and what it started and left."""
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
