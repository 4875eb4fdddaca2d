"""What a handoff's bytes cost: the KV channel between two processes, next to memcpy, a bare socket and grpc.aio.

    python bench/kv_transfer.py [--sizes 64KiB,1MiB,64MiB] [--rounds 9] [--json FILE]

Every way moves the same number of bytes between the same two processes of one run; ways take turns within a round, and
medians over the rounds are told. A handoff's time runs from `begin` to the peer's confirmation that it owns the blocks:
it holds ticket, packing, checksums, unpacking and commit. The others only move bytes into memory that is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import queue
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import torch
import xxhash

from baton.engine.torch_kv_pool import TorchKvPool
from baton.types import KvLayout, Sample, Sampling, SequenceSpec, WorkerIdentity
from kv_transfer.running_receiver import open_receiver
from kv_transfer.sender import SendDone, Sender
from kv_transfer.ticket import TicketDead, TicketEvent
from kv_transfer.transport.connector import make_connector

#: Shape of Llama-3.2-1B: 512 KiB a block.
LAYOUT = KvLayout("bench", 16, 8, 64, "bfloat16", 16)
SIZES = "64KiB,512KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_GRPC_MESSAGE_BYTES = 1 << 20
_GRPC_METHOD = "/baton.bench.Sink/Put"
_GRPC_OPTIONS = [("grpc.max_receive_message_length", 4 << 20)]
_CHECKSUM_PIECE_BYTES = 1 << 20
_PATIENCE_S = 60.0

#: One transfer; returns when the bytes are there.
Transfer = Callable[[], None]


def num_bytes_of(text: str) -> int:
    """Of "64KiB". Raises ValueError."""
    return int(text[:-3]) * _UNITS[text[-3:]]


def block_ids_of(num_blocks: int, num_wanted: int, is_scattered: bool) -> tuple[int, ...]:
    """Blocks of a sequence: neighbours, or drawn from the whole pool."""
    if is_scattered:
        return tuple(random.Random(num_wanted).sample(range(num_blocks), num_wanted))
    return tuple(range(num_wanted))


# The peer: a process of its own that takes orders as lines of JSON.


def tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def serve_kv(transport: str, num_blocks: int) -> None:
    """Offer a ticket per order, until the orders end."""
    pool = TorchKvPool(LAYOUT, num_blocks, torch.device("cpu"))

    def on_event(event: TicketEvent) -> None:
        if isinstance(event, TicketDead):
            print(f"handoff failed: {event.message}", file=sys.stderr)
        running.tickets.release(event.ticket_id)

    running = open_receiver(
        WorkerIdentity("peer", 1), pool, on_event, time.monotonic, transports=(transport,)
    )
    tell({"ready": True})
    for number, line in enumerate(sys.stdin):
        order = json.loads(line)
        num_tokens = int(order["num_tokens"])
        blocks = block_ids_of(num_blocks, LAYOUT.num_blocks_for(num_tokens), order["is_scattered"])
        spec = SequenceSpec(f"r{number}", tuple(range(num_tokens)), Sampling())
        tell({"ticket": running.tickets.offer(spec, blocks, 0, num_tokens).data.hex()})
    running.close()


def fill(sock: socket.socket, view: memoryview) -> bool:
    """Read until the view is full. False at the end of the stream."""
    while view:
        num_bytes = sock.recv_into(view)
        if not num_bytes:
            return False
        view = view[num_bytes:]
    return True


def serve_raw(max_bytes: int) -> None:
    """Per message: eight bytes of length, that many bytes into warm memory, one byte back."""
    memory = memoryview(np.ones(max_bytes, np.uint8)).cast("B")
    with socket.create_server(("127.0.0.1", 0)) as server:
        tell({"port": server.getsockname()[1]})
        sock, _ = server.accept()
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = bytearray(8)
        while fill(sock, memoryview(head)) and fill(sock, memory[: int.from_bytes(head)]):
            sock.sendall(b"\0")


async def serve_grpc(max_bytes: int) -> None:
    """A client stream of raw messages, copied into warm memory."""
    memory = np.ones(max_bytes, np.uint8)

    async def put(messages: AsyncIterator[bytes], context: object) -> bytes:
        del context
        at = 0
        async for message in messages:
            memory[at : at + len(message)] = np.frombuffer(message, np.uint8)
            at += len(message)
        return b"\0"

    server = grpc.aio.server(options=_GRPC_OPTIONS)
    service, method = _GRPC_METHOD.strip("/").split("/")
    handlers = {method: grpc.stream_unary_rpc_method_handler(put)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tell({"port": port})
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)


@dataclass(frozen=True, slots=True)
class Peer:
    """The other process, until its `process.stdin` is closed."""

    process: subprocess.Popen[str]
    hello: dict[str, Any]

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        if self.process.stdin is None:
            raise RuntimeError("the peer takes no orders")
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.listen()

    def listen(self) -> dict[str, Any]:
        if self.process.stdout is None:
            raise RuntimeError("the peer says nothing")
        return cast("dict[str, Any]", json.loads(self.process.stdout.readline()))


@contextmanager
def peer(kind: str, max_bytes: int) -> Iterator[Peer]:
    """Start a peer of a kind and wait for its first line."""
    command = [sys.executable, __file__, "--peer", kind, "--max-bytes", str(max_bytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        waiting = Peer(process, {})
        try:
            yield Peer(process, waiting.listen())
        finally:
            if process.stdin:
                process.stdin.close()


# The ways. Each yields a function that makes the transfer of so many bytes.

Way = Callable[[int], Transfer]


@contextmanager
def memcpy(max_bytes: int) -> Iterator[Way]:
    """One thread, from warm memory to warm memory. Above the cache's size the C library streams past the cache."""
    source, target = np.ones(max_bytes, np.uint8), np.ones(max_bytes, np.uint8)
    yield lambda num_bytes: lambda: np.copyto(target[:num_bytes], source[:num_bytes])


@contextmanager
def raw_socket(max_bytes: int) -> Iterator[Way]:
    """Blocking sends on a loopback TCP connection."""
    memory = memoryview(np.ones(max_bytes, np.uint8)).cast("B")
    with (
        peer("raw", max_bytes) as other,
        socket.create_connection(("127.0.0.1", other.hello["port"])) as sock,
    ):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def transfer(num_bytes: int) -> None:
            sock.sendall(num_bytes.to_bytes(8))
            sock.sendall(memory[:num_bytes])
            if not sock.recv(1):
                raise EOFError

        yield lambda num_bytes: lambda: transfer(num_bytes)


@contextmanager
def grpc_aio(max_bytes: int) -> Iterator[Way]:
    """Raw 1 MiB messages in a client stream."""
    memory = bytes(min(max_bytes, _GRPC_MESSAGE_BYTES))
    with peer("grpc", max_bytes) as other, asyncio.Runner() as runner:
        channel = runner.run(_open_channel(other.hello["port"]))
        call = channel.stream_unary(_GRPC_METHOD)

        async def messages(num_bytes: int) -> AsyncIterator[bytes]:
            for at in range(0, num_bytes, len(memory)):
                yield memory[: num_bytes - at]

        async def transfer(num_bytes: int) -> None:
            await call(messages(num_bytes))

        yield lambda num_bytes: lambda: runner.run(transfer(num_bytes))
        runner.run(channel.close())


async def _open_channel(port: int) -> grpc.aio.Channel:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_GRPC_OPTIONS)
    await channel.channel_ready()
    return channel


@contextmanager
def kv_channel(
    transport: str, source: TorchKvPool, is_scattered: bool, max_bytes: int
) -> Iterator[Way]:
    """Handoffs over one lane."""
    dones: queue.SimpleQueue[SendDone] = queue.SimpleQueue()
    sender = Sender(
        WorkerIdentity("bench", 1),
        LAYOUT,
        source,
        make_connector(transport),
        dones.put,
        time.monotonic,
    )
    with peer(transport, max_bytes) as other:

        def prepare(num_bytes: int) -> Transfer:
            num_tokens = num_bytes // LAYOUT.token_bytes
            blocks = block_ids_of(
                source.num_blocks, LAYOUT.num_blocks_for(num_tokens), is_scattered
            )
            order = {"num_tokens": num_tokens, "is_scattered": is_scattered}
            ticket = bytes.fromhex(other.ask(order)["ticket"])

            def transfer() -> None:
                sender.begin("k", ticket)
                sender.send("k", blocks, 0, num_tokens, 0, LAYOUT.num_layers)
                sender.commit("k", num_tokens, Sample(0), time.monotonic())
                done = dones.get(timeout=_PATIENCE_S)
                if done.error:
                    raise done.error

            return transfer

        yield prepare
        sender.close()


def measure(ways: dict[str, Way], sizes: Sequence[int], num_rounds: int) -> dict[str, list[float]]:
    """Median seconds of each way, per size. The first round warms up and is not counted."""
    medians: dict[str, list[float]] = {name: [] for name in ways}
    for num_bytes in sizes:
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(num_rounds + 1):
            for name, way in ways.items():
                transfer = way(num_bytes)
                start = time.perf_counter()
                transfer()
                times[name].append(time.perf_counter() - start)
        for name, seconds in times.items():
            medians[name].append(statistics.median(seconds[1:]))
    return medians


def checksum_rate() -> float:
    """Bytes per second of the checksum over a piece that was just written."""
    piece = np.ones(_CHECKSUM_PIECE_BYTES, np.uint8)
    seconds = []
    for number in range(50):
        piece.fill(number)
        start = time.perf_counter()
        xxhash.xxh3_64_intdigest(piece.data)
        seconds.append(time.perf_counter() - start)
    return _CHECKSUM_PIECE_BYTES / statistics.median(seconds)


def table(sizes: Sequence[str], medians: dict[str, list[float]]) -> str:
    """Markdown: GB/s, and microseconds of one transfer."""
    rows = ["| GB/s (and us) | " + " | ".join(sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for name, seconds in medians.items():
        cells = (
            f"{num_bytes_of(size) / s / 1e9:.2f} ({s * 1e6:.0f})"
            for size, s in zip(sizes, seconds, strict=True)
        )
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def ratios(
    sizes: Sequence[str], medians: dict[str, list[float]], checksum: float
) -> dict[str, dict[str, float]]:
    """Per size: the channel's rate as a share of its roofs'; and one side's checksum time in a transfer's."""

    def of(index: int) -> dict[str, float]:
        time_s = {name: seconds[index] for name, seconds in medians.items()}
        found = {}
        for name in time_s:
            transport = name.split()[0]
            if transport not in ("shm", "tcp"):
                continue
            roof = "memcpy" if transport == "shm" else "raw tcp"
            found[f"{name} / {roof}"] = time_s[roof] / time_s[name]
            found[f"{name} / grpc.aio"] = time_s["grpc.aio"] / time_s[name]
            found[f"{name}: checksum share"] = (
                num_bytes_of(sizes[index]) / checksum / time_s[name]
            )
        return {name: round(value, 3) for name, value in found.items()}

    return {size: of(index) for index, size in enumerate(sizes)}


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if "model name" in line]
    return {
        "cpu": names[0] if names else platform.processor(),
        "num_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    } | {name: version(name) for name in ("torch", "numpy", "grpcio", "xxhash")}


def run(sizes: Sequence[str], num_rounds: int) -> dict[str, Any]:
    max_bytes = max(map(num_bytes_of, sizes))
    source = TorchKvPool(LAYOUT, _num_blocks(max_bytes), torch.device("cpu"))
    source.tensor.uniform_(-1, 1)
    with ExitStack() as stack:
        ways = {
            "memcpy": stack.enter_context(memcpy(max_bytes)),
            "raw tcp": stack.enter_context(raw_socket(max_bytes)),
            "grpc.aio": stack.enter_context(grpc_aio(max_bytes)),
        }
        for transport in ("shm", "tcp"):
            for is_scattered in (False, True):
                name = f"{transport} {'scattered' if is_scattered else 'contiguous'}"
                opened = kv_channel(transport, source, is_scattered, max_bytes)
                ways[name] = stack.enter_context(opened)
        medians = measure(ways, [num_bytes_of(size) for size in sizes], num_rounds)
    rate = checksum_rate()
    return {
        "machine": machine(),
        "options": {"sizes": sizes, "rounds": num_rounds, "layout": str(LAYOUT)},
        "checksum_gb_per_s": round(rate / 1e9, 1),
        "median_s": medians,
        "ratios": ratios(sizes, medians, rate),
    }


def _num_blocks(max_bytes: int) -> int:
    return -(-max_bytes // LAYOUT.block_bytes)


def serve_peer(kind: str, max_bytes: int) -> None:
    match kind:
        case "raw":
            serve_raw(max_bytes)
        case "grpc":
            asyncio.run(serve_grpc(max_bytes))
        case _:
            serve_kv(kind, _num_blocks(max_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--max-bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        serve_peer(options.peer, options.max_bytes)
        return
    sizes = options.sizes.split(",")
    result = run(sizes, options.rounds)
    print(table(sizes, result["median_s"]))
    print(json.dumps(result["ratios"], indent=1))
    print(json.dumps(result["machine"]))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
