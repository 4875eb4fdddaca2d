"""A TCP proxy that injects network faults: cuts, refusals, delays, low bandwidth, silence, bit
flips.

It runs in its caller's event loop. Settings may change at any time, and apply to open connections
and to later ones.
"""

from __future__ import annotations

import asyncio
import enum
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace

from baton.config import ServeOptions
from baton.supervisor import Cluster
from baton.supervisor.log_lines import forward_to_stderr
from baton.supervisor.plan import ChildSpec

#: SO_LINGER of 0 s: close sends RST and drops unsent data.
_RESET = struct.pack("ii", 1, 0)

#: Maximum pieces buffered per direction before reading pauses.
_MAX_PIECES = 64

#: Maximum seconds of a slow link's time per write.
_THIN_S = 0.05


class Way(enum.Enum):
    """A direction through the proxy."""

    THERE = "to the target"
    BACK = "from the target"


@dataclass(frozen=True, slots=True)
class Weather:
    """Conditions of one direction.

    delay_s: added latency, in seconds. bytes_per_s: bandwidth. flip_every: mean bytes between
    flipped bits. is_silent: nothing passes and nobody is notified; buffered bytes pass afterwards,
    as after a network partition.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    flip_every: int | None = None
    is_silent: bool = False


FAIR = Weather()


class FaultProxy:
    """One link, from its own port to the target's, both on the loopback interface."""

    def __init__(self, target_port: int, seed: int = 0) -> None:
        self._target_port = target_port
        self._rng = random.Random(seed)
        self._weather = dict.fromkeys(Way, FAIR)
        self._changed = asyncio.Event()
        self._pairs: set[_Pair] = set()
        self._listening: socket.socket | None = None
        self.port = 0
        self.num_flipped = 0
        self.num_passed = dict.fromkeys(Way, 0)
        """Bytes passed, over all connections."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FaultProxy]:
        await self.accept()
        try:
            yield self
        finally:
            self.refuse()
            self.heal()
            self.cut()
            await asyncio.gather(*(pair.task for pair in tuple(self._pairs) if pair.task))

    # Faults

    def weather(self, there: Weather = FAIR, back: Weather = FAIR) -> None:
        """Set the conditions of both directions."""
        self._weather = {Way.THERE: there, Way.BACK: back}
        self._changed.set()
        self._changed = asyncio.Event()

    def silence(self) -> None:
        """Pass nothing in either direction; still accept connections."""
        self.weather(Weather(is_silent=True), Weather(is_silent=True))

    def heal(self) -> None:
        self.weather()

    def cut(self) -> None:
        """Reset all connections on both sides."""
        for pair in tuple(self._pairs):
            pair.reset()

    def half_close(self, way: Way) -> None:
        """Send FIN to the end that `way` leads to, and drop later bytes for it. The other direction
        continues."""
        for pair in tuple(self._pairs):
            pair.half_close(way)

    def refuse(self) -> None:
        """Refuse new connections."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None

    async def accept(self) -> None:
        """Accept connections again, on the same port."""
        if self._listening is None:
            self._listening = socket.create_server(("127.0.0.1", self.port))
            self._listening.setblocking(False)
            self.port = self._listening.getsockname()[1]
            asyncio.get_running_loop().add_reader(self._listening, self._accept_one)

    # Bytes

    def _accept_one(self) -> None:
        """Accepts directly on the socket: an asyncio server closed during an accept leaks that
        connection (Python 3.11)."""
        if self._listening is None:
            return
        with suppress(OSError):  # closed meanwhile
            near, _ = self._listening.accept()
            pair = _Pair()
            self._pairs.add(pair)
            pair.task = asyncio.create_task(self._serve(near, pair))

    async def _serve(self, near: socket.socket, pair: _Pair) -> None:
        try:
            with suppress(OSError):
                reader, pair.writers[Way.BACK] = await asyncio.open_connection(sock=near)
                await self._until_not_silent(Way.THERE)
                far_reader, far = await asyncio.open_connection("127.0.0.1", self._target_port)
                pair.writers[Way.THERE] = far
                if pair.is_reset:
                    return
                await asyncio.gather(
                    self._pass(reader, pair, Way.THERE), self._pass(far_reader, pair, Way.BACK)
                )
        finally:
            pair.reset()
            self._pairs.discard(pair)

    async def _pass(self, reader: asyncio.StreamReader, pair: _Pair, way: Way) -> None:
        """Pass one direction of one connection until its end. Raises OSError when either side
        breaks."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_PIECES)
        filling = asyncio.create_task(self._fill(reader, pieces, way))
        try:
            await self._drain(pieces, pair, way)
            await filling
        finally:
            filling.cancel()

    async def _fill(
        self, reader: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]], way: Way
    ) -> None:
        loop = asyncio.get_running_loop()
        data = b"-"
        while data:
            try:
                data = await reader.read(65536)
            except OSError:
                data = b""
            await pieces.put((loop.time() + self._weather[way].delay_s, data))

    async def _drain(
        self, pieces: asyncio.Queue[tuple[float, bytes]], pair: _Pair, way: Way
    ) -> None:
        loop, writer = asyncio.get_running_loop(), pair.writers[way]
        while True:
            due_s, data = await pieces.get()
            await asyncio.sleep(due_s - loop.time())
            await self._until_not_silent(way)
            if not data:
                pair.half_close(way)
                return
            for part in _parts(data, self._weather[way].bytes_per_s):
                if way not in pair.closed:
                    self.num_passed[way] += len(part)
                    writer.write(self._flipped(part, self._weather[way].flip_every))
                    await writer.drain()
                if bytes_per_s := self._weather[way].bytes_per_s:
                    await asyncio.sleep(len(part) / bytes_per_s)

    async def _until_not_silent(self, way: Way) -> None:
        while self._weather[way].is_silent:
            await self._changed.wait()

    def _flipped(self, data: bytes, flip_every: int | None) -> bytes:
        if flip_every is None:
            return data
        flipped = bytearray(data)
        at = self._distance(flip_every)
        while at < len(flipped):
            flipped[at] ^= 1 << self._rng.randrange(8)
            self.num_flipped += 1
            at += 1 + self._distance(flip_every)
        return bytes(flipped)

    def _distance(self, flip_every: int) -> int:
        return int(self._rng.expovariate(1.0 / flip_every))


def _parts(data: bytes, bytes_per_s: float | None) -> list[bytes]:
    """Split into pieces that a slow link carries in _THIN_S."""
    size = max(1, int(bytes_per_s * _THIN_S)) if bytes_per_s else len(data)
    return [data[at : at + size] for at in range(0, len(data), size)]


class _Pair:
    """A connection and its continuation to the target."""

    def __init__(self) -> None:
        self.writers: dict[Way, asyncio.StreamWriter] = {}
        self.closed: set[Way] = set()
        self.task: asyncio.Task[None] | None = None
        self.is_reset = False

    def half_close(self, way: Way) -> None:
        writer = self.writers.get(way)
        if writer is None or way in self.closed:
            return
        self.closed.add(way)
        with suppress(OSError):
            writer.write_eof()

    def reset(self) -> None:
        self.is_reset = True
        for writer in self.writers.values():
            sock: socket.socket | None = writer.get_extra_info("socket")
            with suppress(OSError):
                if sock is not None and sock.fileno() >= 0:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


class ProxiedCluster(Cluster):
    """A cluster with proxied links, named by their target: a worker's name for gateway to worker,
    "kv " and its name for workers to its KV channel, "gateway" for clients to the gateway. Requires
    --kv-transport tcp."""

    def __init__(self, options: ServeOptions) -> None:
        super().__init__(options, on_line=self._take_line)
        self.log_lines: list[str] = []
        """Log lines of all processes; also copied to stderr."""
        self._stack = AsyncExitStack()
        self.links: dict[str, FaultProxy] = {}

    @property
    def front(self) -> str:
        """host:port of the gateway for clients."""
        return f"127.0.0.1:{self.links['gateway'].port}"

    async def start(self) -> None:
        await super().start()
        await self._link("gateway", int(self.address.rpartition(":")[2]))

    async def stop(self) -> None:
        # Close links first: a worker asked to stop must not wait for bytes held by a proxy.
        await self._stack.aclose()
        await super().stop()

    def _take_line(self, name: str, line: str) -> None:
        self.log_lines.append(line)
        forward_to_stderr(name, line)

    async def _start_all(
        self, workers: tuple[ChildSpec, ...], gateways: tuple[ChildSpec, ...]
    ) -> None:
        linked = [await self._with_kv_link(spec) for spec in workers]
        await super()._start_all(tuple(linked), gateways)

    async def _address_for_gateways(self, name: str, address: str) -> str:
        proxy = await self._link(name, int(address.rpartition(":")[2]))
        return f"127.0.0.1:{proxy.port}"

    async def _with_kv_link(self, spec: ChildSpec) -> ChildSpec:
        port = _free_port()
        proxy = await self._link(f"kv {spec.name}", port)
        addresses = (f"--kv-port={port}", f"--kv-advertise-address=127.0.0.1:{proxy.port}")
        return replace(spec, arguments=(*addresses, *spec.arguments))

    async def _link(self, name: str, target_port: int) -> FaultProxy:
        proxy = FaultProxy(target_port, seed=len(self.links))
        self.links[name] = await self._stack.enter_async_context(proxy.running())
        return proxy


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
