"""Cost of inactive connections at the gateway: idle ones, and streams with clients that do not
read."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.host_gateway import Flow, gateway_before_source, open_post, read_events
from bench.threads import cpu_seconds

#: Connections opened at once, at most the accept queue's length.
_NUM_AT_ONCE = 250

#: File descriptors of a process besides its connections.
_NUM_SPARE_FILES = 200


@dataclass(frozen=True, slots=True)
class IdleCosts:
    """Idle keep-alive connections after one use. bytes_each: resident memory of the gateway per
    connection. cpu_before, cpu: the gateway's share of a core without and with them."""

    num_connections: int
    bytes_each: float
    cpu_before: float
    cpu: float


@dataclass(frozen=True, slots=True)
class SlowReaderCosts:
    """Streams with clients that read nothing at first and everything later, beside as many with
    clients that read at once.

    held_bytes: resident memory of the gateway per unread token. brisk_cpu_us, cpu_us: per token,
    with reading clients only, and with both.
    """

    num_streams: int
    num_tokens: int
    held_bytes: float
    brisk_cpu_us: float
    cpu_us: float


async def measure_idle(model: str, num_connections: int, seconds: float) -> IdleCosts:
    """seconds: duration of the watch, before and with the connections."""
    async with (
        files_for(num_connections),
        gateway_before_source(model, Flow(1, 1, 1, 0.0)) as (cluster, _),
    ):
        address, pid = cluster.http_address, cluster.pid_of("gateway")
        async with open_post(address, 1) as reader:  # one-time allocations are done
            await reader.read()
        before_s = await _cpu_of(pid, seconds)
        before_bytes = _resident_bytes(pid)
        writers = []
        for first in range(0, num_connections, _NUM_AT_ONCE):
            num = min(_NUM_AT_ONCE, num_connections - first)
            writers += await asyncio.gather(*(_use_once(address) for _ in range(num)))
        resident_bytes = _resident_bytes(pid)
        with_them_s = await _cpu_of(pid, seconds)
        for writer in writers:
            writer.close()
    bytes_each = (resident_bytes - before_bytes) / num_connections
    return IdleCosts(num_connections, bytes_each, before_s / seconds, with_them_s / seconds)


async def measure_slow_readers(model: str, num_streams: int, num_tokens: int) -> SlowReaderCosts:
    """One token per stream in each step of 5 ms."""
    flow = Flow(num_streams, num_tokens, 1, 5.0)
    async with gateway_before_source(model, flow) as (cluster, _):
        address, pid = cluster.http_address, cluster.pid_of("gateway")

        async def brisk_s() -> float:
            begin_s = cpu_seconds(pid)
            streams = (open_post(address, num_tokens) for _ in range(num_streams))
            await asyncio.gather(*(read_events(stream) for stream in streams))
            return cpu_seconds(pid) - begin_s

        alone_s = await brisk_s()
        before_bytes = _resident_bytes(pid)
        async with AsyncExitStack() as slow:
            # Little is buffered here, so the rest stays in socket buffers.
            opened = (open_post(address, num_tokens, limit=1) for _ in range(num_streams))
            readers = [await slow.enter_async_context(one) for one in opened]
            both_s = await brisk_s()
            held_bytes = _resident_bytes(pid) - before_bytes
            await asyncio.gather(*(reader.read() for reader in readers))
    num_all = num_streams * num_tokens
    return SlowReaderCosts(
        num_streams,
        num_tokens,
        held_bytes / num_all,
        alone_s / num_all * 1e6,
        both_s / (2 * num_all) * 1e6,
    )


@asynccontextmanager
async def files_for(num_connections: int) -> AsyncIterator[None]:
    """Raise the limit of file descriptors to num_connections, for this process and its children.
    Raises RuntimeError if the system allows fewer."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + _NUM_SPARE_FILES
    if limits[1] != resource.RLIM_INFINITY and limits[1] < wanted:
        raise RuntimeError(f"{limits[1]} open files are allowed; {wanted} are needed (ulimit -n)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], wanted), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def _use_once(address: str) -> asyncio.StreamWriter:
    """Open a connection, receive one answer, and keep it open."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /version HTTP/1.1\r\nhost: {address}\r\n\r\n".encode())
    await reader.readuntil(b"}")
    return writer


async def _cpu_of(pid: int, seconds: float) -> float:
    begin_s = cpu_seconds(pid)
    await asyncio.sleep(seconds)
    return cpu_seconds(pid) - begin_s


def _resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()
