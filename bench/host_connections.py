"""What connections cost the gateway that want nothing: idle ones, and streams whose clients do not
read."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.host_gateway import Flow, cpu_seconds, gateway_before_source, open_post, read_events

#: Opened at once, so that the queue of those not accepted yet does not overflow.
_NUM_AT_ONCE = 250

#: Descriptors that a process needs beside its connections.
_NUM_SPARE_FILES = 200


@dataclass(frozen=True, slots=True)
class IdleCosts:
    """Of keep-alive connections that were used once. bytes_each: of the gateway's resident memory.
    cpu_before, cpu: shares of a core that the gateway takes without them, and with them."""

    num_connections: int
    bytes_each: float
    cpu_before: float
    cpu: float


@dataclass(frozen=True, slots=True)
class SlowReaderCosts:
    """Of streams whose clients read nothing, beside as many that read all, and then all of it.

    held_bytes: of the gateway's resident memory, for each token that such a client did not take
    yet. brisk_cpu_us, cpu_us: for a token, with the brisk streams alone, and with both kinds.
    """

    num_streams: int
    num_tokens: int
    held_bytes: float
    brisk_cpu_us: float
    cpu_us: float


async def measure_idle(model: str, num_connections: int, seconds: float) -> IdleCosts:
    """seconds: that the gateway is watched, before and with them."""
    async with (
        files_for(num_connections),
        gateway_before_source(model, Flow(1, 1, 1, 0.0)) as (cluster, _),
    ):
        address, pid = cluster.http_address, cluster.pid_of("gateway")
        async with open_post(address, 1) as reader:  # what is made once is there
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
    """One token of each stream in a step of 5 ms."""
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
            # A few bytes of each are read ahead here; the sockets' buffers hold what comes next.
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
    """So many descriptors may be open in this process, and in those that it starts. Raises
    RuntimeError where the system allows fewer."""
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
    """A connection that had one answer and is kept."""
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
