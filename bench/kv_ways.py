"""Transfer variants of bench.kv_transfer, each between this process and its own peer process."""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import torch
import trustme

from baton.rpc.tls import TlsFiles
from baton.types import KvLayout, Sampling, SequenceSpec, WorkerIdentity
from engine.kv.range import KvRange
from engine.kv.tensors.paged import TorchKvPool
from kv_transfer.handshake import ReceiverConfig, SenderConfig
from kv_transfer.kv_secret import KvSecret
from kv_transfer.send_connection import Finish, Send
from kv_transfer.sender import SendDone, Sender
from kv_transfer.ticket import TicketAborted, TicketCommitted, TicketEvent
from kv_transfer.transport.base import TransportConfig
from kv_transfer.transport.connector import make_connector
from kv_transfer.transport.listeners import open_receiver

#: KV of Llama-3.2-1B: 512 KiB per block.
LAYOUT = KvLayout("bench", 16, 8, 64, "bfloat16", 16)
_GRPC_MESSAGE_BYTES = 1 << 20
_GRPC_METHOD = "/baton.bench.Sink/Put"
_GRPC_OPTIONS = [("grpc.max_receive_message_length", 4 << 20)]
_PATIENCE_S = 60.0
_ROOT = Path(__file__).resolve().parents[1]
_SECRET = KvSecret(b"known to both processes of a benchmark")

#: Performs one transfer; returns when the bytes have arrived.
Transfer = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Channel:
    """A variant of the KV channel. wire_dtype: transfer dtype of bfloat16 KV. num_handoffs:
    concurrent handoffs that share the bytes. certificates: folder of a certificate for both ends,
    for TLS; empty: no TLS."""

    transport: str
    wire_dtype: str = "auto"
    is_scattered: bool = True
    has_secret: bool = False
    certificates: str = ""
    num_handoffs: int = 1
    num_connections: int = 1

    @property
    def secret(self) -> KvSecret | None:
        return _SECRET if self.has_secret else None

    @property
    def tls(self) -> TlsFiles | None:
        if not self.certificates:
            return None
        ca_certs, certfile, keyfile = (Path(self.certificates) / name for name in _PEM_FILES)
        return TlsFiles(ca_certs, certfile, keyfile)


_PEM_FILES = ("ca.pem", "own.crt", "own.key")


@contextmanager
def certificates() -> Iterator[str]:
    """A folder with a certificate of a new authority."""
    with tempfile.TemporaryDirectory() as folder:
        authority = trustme.CA()
        own = authority.issue_cert("127.0.0.1")
        blobs = (authority.cert_pem, own.cert_chain_pems[0], own.private_key_pem)
        for name, blob in zip(_PEM_FILES, blobs, strict=True):
            blob.write_to_path(str(Path(folder) / name))
        yield folder


def num_blocks_of(num_bytes: int) -> int:
    return -(-num_bytes // LAYOUT.block_bytes)


def block_ids_of(num_blocks: int, num_wanted: int, is_scattered: bool) -> tuple[int, ...]:
    """Blocks of a sequence: contiguous, or drawn from the whole pool."""
    if is_scattered:
        return tuple(random.Random(num_wanted).sample(range(num_blocks), num_wanted))
    return tuple(range(num_wanted))


def shares_of(
    num_tokens: int, channel: Channel, num_blocks: int
) -> list[tuple[int, tuple[int, ...]]]:
    """(tokens, blocks) of each handoff; with several, all but the last have whole blocks."""
    blocks = block_ids_of(num_blocks, LAYOUT.num_blocks_for(num_tokens), channel.is_scattered)
    size = -(-len(blocks) // channel.num_handoffs)
    parts = [blocks[at : at + size] for at in range(0, len(blocks), size)]
    counts = [LAYOUT.block_size * len(part) for part in parts]
    counts[-1] += num_tokens - sum(counts)
    return list(zip(counts, parts, strict=True))


# The peer: a separate process that reads commands as lines of JSON.


def report(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def serve_kv(channel: Channel, num_blocks: int) -> None:
    """Per command: offer tickets, or report durations since the last report; until stdin ends."""
    pool = TorchKvPool(LAYOUT, num_blocks, torch.device("cpu"))
    presented_s: list[float] = []

    def on_event(event: TicketEvent) -> None:
        if isinstance(event, TicketCommitted):
            presented_s.append(time.monotonic() - event.reserved_s)
        elif isinstance(event, TicketAborted):
            print(f"handoff failed: {event.message}", file=sys.stderr)
        running.tickets.release(event.ticket_id)

    running = open_receiver(
        ReceiverConfig(
            WorkerIdentity("peer", 1), pool, wire_dtype=channel.wire_dtype, secret=channel.secret
        ),
        on_event,
        time.monotonic,
        transports=(channel.transport,),
        listen=TransportConfig(tls=channel.tls),
    )

    def offered(num_tokens: int, blocks: tuple[int, ...]) -> str:
        spec = SequenceSpec("r", tuple(range(num_tokens)), Sampling())
        return running.tickets.offer(spec, blocks, 0, num_tokens).data.hex()

    report({"ready": True})
    for line in sys.stdin:
        num_tokens = int(json.loads(line)["num_tokens"])
        if not num_tokens:
            report({"presented_s": presented_s})
            presented_s.clear()
            continue
        shares = shares_of(num_tokens, channel, num_blocks)
        report({"tickets": [offered(*share) for share in shares]})
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
    """Per message: read eight bytes of length and that many bytes into warm memory; answer one
    byte."""
    memory = np.ones(max_bytes, np.uint8).data
    with socket.create_server(("127.0.0.1", 0)) as server:
        report({"port": server.getsockname()[1]})
        sock, _ = server.accept()
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = bytearray(8)
        while fill(sock, memoryview(head)) and fill(sock, memory[: int.from_bytes(head)]):
            sock.sendall(b"\0")


async def serve_grpc(max_bytes: int) -> None:
    """Copy a client stream of raw messages into warm memory."""
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
    report({"port": port})
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)


@dataclass(frozen=True, slots=True)
class Peer:
    """The peer process; ends when its `process.stdin` is closed."""

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
    command = [sys.executable, "-m", "bench.kv_ways", kind, str(max_bytes)]
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
    """A variant. prepare: from a number of bytes, makes the transfer. peer_pid: the receiving
    process, if it is another one. presented_s: seconds from the presentation of a ticket to its
    commit, at the receiver, for each handoff since the last call."""

    prepare: Callable[[int], Transfer]
    peer_pid: int | None = None
    presented_s: Callable[[], list[float]] = list


@contextmanager
def memcpy(max_bytes: int) -> Iterator[Way]:
    """One thread, between warm buffers. Beyond the cache's size, the C library uses non-temporal
    stores."""
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
def kv_channel(channel: Channel, source: TorchKvPool, max_bytes: int) -> Iterator[Way]:
    """Handoffs to one worker. max_bytes: KV size in bfloat16, for any transfer dtype."""
    dones: queue.SimpleQueue[SendDone] = queue.SimpleQueue()
    config = SenderConfig(
        WorkerIdentity("bench", 1),
        source,
        make_connector(channel.transport, tls=channel.tls),
        time.monotonic,
        secret=channel.secret,
    )
    sender = Sender(config, dones.put, num_connections=channel.num_connections)
    with peer(json.dumps(asdict(channel)), max_bytes) as other:

        def prepare(num_bytes: int) -> Transfer:
            num_tokens = num_bytes // LAYOUT.token_bytes
            shares = shares_of(num_tokens, channel, source.num_blocks)
            tickets = [bytes.fromhex(t) for t in other.ask({"num_tokens": num_tokens})["tickets"]]

            def transfer() -> None:
                for number, (ticket, (count, blocks)) in enumerate(
                    zip(tickets, shares, strict=True)
                ):
                    whole = KvRange(0, count, 0, LAYOUT.num_layers)
                    finish = Finish(number, count, (), time.monotonic())
                    sender.begin(number, ticket, Send(number, blocks, whole), finish)
                for done in [dones.get(timeout=_PATIENCE_S) for _ in shares]:
                    if done.error:
                        raise done.error

            return transfer

        yield Way(
            prepare, other.process.pid, lambda: list(other.ask({"num_tokens": 0})["presented_s"])
        )
        sender.close()


def serve_peer(kind: str, max_bytes: int) -> None:
    match kind:
        case "raw":
            serve_raw(max_bytes)
        case "grpc":
            asyncio.run(serve_grpc(max_bytes))
        case _:
            serve_kv(Channel(**json.loads(kind)), num_blocks_of(max_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description="A peer of bench.kv_transfer: orders on stdin.")
    parser.add_argument("kind", help="raw, grpc, or a channel as JSON")
    parser.add_argument("max_bytes", type=int)
    options = parser.parse_args()
    serve_peer(options.kind, options.max_bytes)


if __name__ == "__main__":
    main()
