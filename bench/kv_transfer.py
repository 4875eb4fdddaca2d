"""What a handoff's bytes cost: the KV channel between two processes, next to memcpy, a bare socket and grpc.aio.

    python -m bench.kv_transfer [--sizes 64KiB,1MiB,64MiB] [--rounds 9] [--json FILE]

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
from dataclasses import asdict, dataclass
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
from kv_transfer.transport.nixl import has_nixl

#: Shape of Llama-3.2-1B: 512 KiB a block.
LAYOUT = KvLayout("bench", 16, 8, 64, "bfloat16", 16)
SIZES = "64KiB,512KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
#: What KV also travels as.
SCALED = ("int8", "fp8")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_GRPC_MESSAGE_BYTES = 1 << 20
_GRPC_METHOD = "/baton.bench.Sink/Put"
_GRPC_OPTIONS = [("grpc.max_receive_message_length", 4 << 20)]
_CHECKSUM_PIECE_BYTES = 1 << 20
_PATIENCE_S = 60.0
_ROOT = Path(__file__).resolve().parents[1]

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


def serve_kv(transport: str, wire_dtype: str, num_blocks: int) -> None:
    """Offer a ticket per order, until the orders end."""
    pool = TorchKvPool(LAYOUT, num_blocks, torch.device("cpu"))

    def on_event(event: TicketEvent) -> None:
        if isinstance(event, TicketDead):
            print(f"handoff failed: {event.message}", file=sys.stderr)
        running.tickets.release(event.ticket_id)

    running = open_receiver(
        WorkerIdentity("peer", 1),
        pool,
        on_event,
        time.monotonic,
        transports=(transport,),
        wire_dtype=wire_dtype,
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
    memory = np.ones(max_bytes, np.uint8).data
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
    handlers: dict[str, Any] = {method: grpc.stream_unary_rpc_method_handler(put)}
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
    command = [sys.executable, "-m", "bench.kv_transfer", "--peer", kind]
    command += ["--max-bytes", str(max_bytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
    ) as process:
        waiting = Peer(process, {})
        try:
            yield Peer(process, waiting.listen())
        finally:
            if process.stdin:
                process.stdin.close()


@dataclass(frozen=True, slots=True)
class Way:
    """How bytes can go. prepare: makes the transfer of so many. peer_pid: the process that takes them, if it is another."""

    prepare: Callable[[int], Transfer]
    peer_pid: int | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one transfer, in seconds: by the clock, and on the CPU of the side that needs more of it."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Of many. On a machine with other work the best is nearer to what a transfer costs than the median."""

    median_s: float
    best_s: float
    median_cpu_s: float


def summary_of(costs: Sequence[Cost]) -> Summary:
    wall_s = [cost.wall_s for cost in costs]
    return Summary(
        statistics.median(wall_s), min(wall_s), statistics.median(cost.cpu_s for cost in costs)
    )


def peer_cpu_s_of(way: Way) -> float:
    """Seconds that the threads of the other process have run; 0 where the kernel does not tell."""
    tasks = Path(f"/proc/{way.peer_pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


# The ways.


@contextmanager
def memcpy(max_bytes: int) -> Iterator[Way]:
    """One thread, from warm memory to warm memory. Above the cache's size the C library streams past the cache."""
    source, target = np.ones(max_bytes, np.uint8), np.ones(max_bytes, np.uint8)
    yield Way(lambda num_bytes: lambda: np.copyto(target[:num_bytes], source[:num_bytes]))


@contextmanager
def raw_socket(max_bytes: int) -> Iterator[Way]:
    """Blocking sends on a loopback TCP connection."""
    memory = np.ones(max_bytes, np.uint8).data
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

        yield Way(lambda num_bytes: lambda: transfer(num_bytes), other.process.pid)


@contextmanager
def grpc_aio(max_bytes: int) -> Iterator[Way]:
    """Raw 1 MiB messages in a client stream."""
    memory = bytes(min(max_bytes, _GRPC_MESSAGE_BYTES))
    with peer("grpc", max_bytes) as other, asyncio.Runner() as runner:
        channel = runner.run(_open_channel(other.hello["port"]))
        call: Any = channel.stream_unary(_GRPC_METHOD)

        async def messages(num_bytes: int) -> AsyncIterator[bytes]:
            for at in range(0, num_bytes, len(memory)):
                yield memory[: num_bytes - at]

        async def transfer(num_bytes: int) -> None:
            await call(messages(num_bytes))

        yield Way(lambda num_bytes: lambda: runner.run(transfer(num_bytes)), other.process.pid)
        runner.run(channel.close())


async def _open_channel(port: int) -> grpc.aio.Channel:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_GRPC_OPTIONS)
    await channel.channel_ready()
    return channel


@contextmanager
def kv_channel(
    transport: str,
    source: TorchKvPool,
    is_scattered: bool,
    max_bytes: int,
    wire_dtype: str = "auto",
) -> Iterator[Way]:
    """Handoffs over one lane, of so many bytes of bfloat16 whatever they travel as."""
    dones: queue.SimpleQueue[SendDone] = queue.SimpleQueue()
    sender = Sender(
        WorkerIdentity("bench", 1),
        LAYOUT,
        source,
        make_connector(transport),
        dones.put,
        time.monotonic,
    )
    with peer(f"{transport}/{wire_dtype}", max_bytes) as other:

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
                sender.commit("k", num_tokens, (Sample(0),), time.monotonic())
                done = dones.get(timeout=_PATIENCE_S)
                if done.error:
                    raise done.error

            return transfer

        yield Way(prepare, other.process.pid)
        sender.close()


def timed(way: Way, num_bytes: int) -> Cost:
    transfer = way.prepare(num_bytes)
    peer_cpu_s = peer_cpu_s_of(way)
    own_cpu_s, start = time.process_time(), time.perf_counter()
    transfer()
    wall_s, own_cpu_s = time.perf_counter() - start, time.process_time() - own_cpu_s
    return Cost(wall_s, max(own_cpu_s, peer_cpu_s_of(way) - peer_cpu_s))


def measure(
    ways: dict[str, Way], sizes: Sequence[int], num_rounds: int
) -> dict[str, list[Summary]]:
    """What each way costs, per size. The first round warms up and is not counted."""
    found: dict[str, list[Summary]] = {name: [] for name in ways}
    for num_bytes in sizes:
        costs: dict[str, list[Cost]] = {name: [] for name in ways}
        for _ in range(num_rounds + 1):
            for name, way in ways.items():
                costs[name].append(timed(way, num_bytes))
        for name, (_, *counted) in costs.items():
            found[name].append(summary_of(counted))
    return found


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


def table(sizes: Sequence[str], found: dict[str, list[Summary]]) -> str:
    """Markdown: GB/s of the median and of the best, and microseconds of the median."""
    rows = ["| GB/s, best (us) | " + " | ".join(sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for name, summaries in found.items():
        cells = []
        for size, summary in zip(sizes, summaries, strict=True):
            median, best = (
                num_bytes_of(size) / time_s / 1e9 for time_s in (summary.median_s, summary.best_s)
            )
            cells.append(f"{median:.2f}, {best:.2f} ({summary.median_s * 1e6:.0f})")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def ratios(
    sizes: Sequence[str], found: dict[str, list[Summary]], checksum_s_per_byte: float
) -> dict[str, dict[str, float]]:
    """Per size, of each way of the channel: its rate next to its roof's and grpc.aio's (medians, bests, and by the CPU
    of the busier side), and the share of the time in which one side computes checksums."""

    def of(index: int) -> dict[str, float]:
        summary_by = {name: summaries[index] for name, summaries in found.items()}
        checksum_s = num_bytes_of(sizes[index]) * checksum_s_per_byte
        values = {}
        for name, own in summary_by.items():
            roof = {"shm": "memcpy", "tcp": "raw tcp"}.get(name.split()[0])
            if not roof:
                continue
            for other in (roof, "grpc.aio"):
                theirs = summary_by[other]
                values[f"{name} / {other}"] = theirs.median_s / own.median_s
                values[f"{name} / {other}, best"] = theirs.best_s / own.best_s
                values[f"{name} / {other}, CPU"] = theirs.median_cpu_s / own.median_cpu_s
            values[f"{name}: checksum share"] = checksum_s / own.best_s
        return {name: round(value, 3) for name, value in values.items()}

    return {size: of(index) for index, size in enumerate(sizes)}


def ratio_table(found: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    rows = ["| ratio | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for name in next(iter(found.values())):
        cells = " | ".join(f"{of_size[name]:.2f}" for of_size in found.values())
        rows.append(f"| {name} | {cells} |")
    return "\n".join(rows)


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


@dataclass(frozen=True, slots=True)
class Result:
    """All of a run; written as JSON."""

    machine: dict[str, Any]
    sizes: Sequence[str]
    num_rounds: int
    layout: KvLayout
    checksum_gb_per_s: float
    summaries: dict[str, list[Summary]]
    ratios: dict[str, dict[str, float]]


def run(sizes: Sequence[str], num_rounds: int) -> Result:
    max_bytes = max(map(num_bytes_of, sizes))
    source = TorchKvPool(LAYOUT, _num_blocks(max_bytes), torch.device("cpu"))
    source.tensor.uniform_(-1, 1)
    with ExitStack() as stack:
        ways = {
            "memcpy": stack.enter_context(memcpy(max_bytes)),
            "raw tcp": stack.enter_context(raw_socket(max_bytes)),
            "grpc.aio": stack.enter_context(grpc_aio(max_bytes)),
        }
        for transport in ("shm", "tcp", *(["nixl"] if has_nixl() else [])):
            for is_scattered in (False, True):
                name = f"{transport} {'scattered' if is_scattered else 'contiguous'}"
                opened = kv_channel(transport, source, is_scattered, max_bytes)
                ways[name] = stack.enter_context(opened)
            for wire_dtype in SCALED:
                converted = kv_channel(transport, source, True, max_bytes, wire_dtype)
                ways[f"{transport} {wire_dtype}"] = stack.enter_context(converted)
        found = measure(ways, [num_bytes_of(size) for size in sizes], num_rounds)
    rate = checksum_rate()
    return Result(
        machine(), sizes, num_rounds, LAYOUT, rate / 1e9, found, ratios(sizes, found, 1 / rate)
    )


def _num_blocks(max_bytes: int) -> int:
    return -(-max_bytes // LAYOUT.block_bytes)


def serve_peer(kind: str, max_bytes: int) -> None:
    match kind:
        case "raw":
            serve_raw(max_bytes)
        case "grpc":
            asyncio.run(serve_grpc(max_bytes))
        case _:
            transport, _, wire_dtype = kind.partition("/")
            serve_kv(transport, wire_dtype, _num_blocks(max_bytes))


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
    print(table(sizes, result.summaries), ratio_table(result.ratios), sep="\n\n")
    print(json.dumps(result.machine | {"checksum_gb_per_s": result.checksum_gb_per_s}))
    if options.json:
        options.json.write_text(json.dumps(asdict(result), indent=1) + "\n")


if __name__ == "__main__":
    main()
