"""KV channel bytes for one prompt with n choices or beams: a packet capture beside a proxy's count.

    python -m bench.kv_capture [--most 16] [MODEL]

Real processes of the model in a network namespace of their own, with an otherwise unused loopback
(`unshare` of util-linux creates it, for root or where users may create namespaces). A packet socket
captures traffic to the decode worker's KV port. Exit status 1: proxy and capture differ, or more
was sent than the prompt's KV once and `MAX_OVERHEAD_BYTES` per choice.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rich.console import Console

from baton.client import AsyncClient, BeamSearch, SamplingParams
from baton.config import ServeOptions
from bench.fault_proxy import FaultProxy, ProxiedCluster, Way
from bench.machine import BUNDLED_MODEL
from bench.suite.markdown import table

NUM_PROMPT_TOKENS = 640
NUM_NEW_TOKENS = 4
#: Allowed bytes of frame headers, commits and lease renewals; and per choice, for its first token.
MAX_OVERHEAD_BYTES, MAX_CHOICE_BYTES = 4096, 256
#: Seconds for the proxy to pass on all captured bytes.
SETTLES_S = 5.0

_ETH_P_IP = 0x0800
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 64 * 2**20
_SYN = 2
#: Captured bytes per packet: IPv4 and TCP headers with options.
_HEADERS_BYTES = 120


@dataclass(frozen=True, slots=True)
class Sent:
    """Traffic to one port: packets as the kernel passes them (up to 64 KiB each on the loopback);
    TCP payload bytes; retransmitted bytes, which a proxy does not see; and packet bytes, including
    IP and TCP headers."""

    num_packets: int = 0
    payload_bytes: int = 0
    repeated_bytes: int = 0
    packet_bytes: int = 0

    @property
    def as_bytes(self) -> tuple[int, int, int]:
        return self.payload_bytes, self.repeated_bytes, self.packet_bytes

    def since(self, before: Sent) -> Sent:
        return Sent(
            self.num_packets - before.num_packets,
            self.payload_bytes - before.payload_bytes,
            self.repeated_bytes - before.repeated_bytes,
            self.packet_bytes - before.packet_bytes,
        )


class Capture:
    """Captures packets to one loopback port by a packet socket."""

    def __init__(self, port: int) -> None:
        """Raises PermissionError without the right to capture."""
        self._port = port
        self._sent = Sent()
        #: By sender port: the next sequence number.
        self._next: dict[int, int] = {}
        # A single protocol, not all: each packet is then seen once, on arrival.
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_IP))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        self._socket.bind(("lo", _ETH_P_IP))
        self._socket.setblocking(False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Capture]:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._take)
        try:
            yield self
        finally:
            loop.remove_reader(self._socket)
            self._socket.close()

    def sent(self) -> Sent:
        """Traffic so far. Raises OSError if packets were dropped."""
        self._take()
        statistics = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        if num_dropped := struct.unpack("II", statistics)[1]:
            raise OSError(f"{num_dropped} packets were not captured")
        return self._sent

    def _take(self) -> None:
        while True:
            try:
                data = self._socket.recv(_HEADERS_BYTES)
            except BlockingIOError:
                return
            self._add(data)

    def _add(self, data: bytes) -> None:
        """Parses IPv4 and TCP headers: RFC 791, RFC 9293."""
        ip_bytes = (data[0] & 15) * 4
        if data[9] != socket.IPPROTO_TCP:
            return
        (packet_bytes,) = struct.unpack_from("!H", data, 2)
        sender, port, sequence = struct.unpack_from("!HHI", data, ip_bytes)
        if port != self._port:
            return
        tcp_bytes = (data[ip_bytes + 12] >> 4) * 4
        payload_bytes = packet_bytes - ip_bytes - tcp_bytes
        if data[ip_bytes + 13] & _SYN:
            self._next[sender] = sequence + 1
        num_new = 0
        if payload_bytes:
            end = sequence + payload_bytes
            # Sequence numbers wrap at 32 bits.
            ahead = (end - self._next.get(sender, sequence)) & 0xFFFFFFFF
            num_new = min(ahead, payload_bytes) if ahead < 1 << 31 else 0
            if num_new:
                self._next[sender] = end & 0xFFFFFFFF
        self._sent = Sent(
            self._sent.num_packets + 1,
            self._sent.payload_bytes + num_new,
            self._sent.repeated_bytes + payload_bytes - num_new,
            self._sent.packet_bytes + packet_bytes,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """Traffic of one request. kv_bytes: KV size of its prompt."""

    kind: str
    number: int
    kv_bytes: int
    proxy_bytes: int
    sent: Sent

    @property
    def is_sound(self) -> bool:
        over = self.sent.payload_bytes - self.kv_bytes
        return (
            self.sent.payload_bytes == self.proxy_bytes
            and 0 < over < MAX_OVERHEAD_BYTES + MAX_CHOICE_BYTES * self.number
        )


async def measure(model: str, most: int) -> list[Row]:
    """Measure 1 to `most` choices, and as many beams."""
    options = ServeOptions(
        model=model,
        dtype="float32",
        kv_transport="tcp",
        kv_cache_memory_bytes=256 << 20,
        port=0,
        log_level="error",
        # The decode worker must not compute prompts itself, or nothing is sent.
        max_local_prefill_tokens=0,
    )
    rng = random.Random(1)
    async with (
        ProxiedCluster(options) as cluster,
        AsyncClient(cluster.address) as client,
        Capture(cluster.links["kv decode-0"].port).running() as capture,
    ):
        vocab_size = (await client.model()).vocab_size
        rows = []
        for kind in ("n", "beams"):
            for number in range(1, most + 1):
                prompt = tuple(rng.randrange(vocab_size) for _ in range(NUM_PROMPT_TOKENS))
                rows.append(await _row(cluster, client, capture, prompt, kind, number))
        return rows


async def _row(
    cluster: ProxiedCluster,
    client: AsyncClient,
    capture: Capture,
    prompt: tuple[int, ...],
    kind: str,
    number: int,
) -> Row:
    params = SamplingParams(n=number, temperature=1.0, seed=1, ignore_eos=True)
    if kind == "beams":
        params = SamplingParams(beam_search=BeamSearch(number))
    link = cluster.links["kv decode-0"]
    await _until_nothing_is_held(client)
    sent_before, passed_before = await _counts(link, capture)
    done = await client.generate(prompt, params.with_options(max_tokens=NUM_NEW_TOKENS))
    await _until_nothing_is_held(client)
    sent, passed = await _counts(link, capture)
    sent = sent.since(sent_before)
    return Row(kind, number, done.timing.transfer_bytes, passed - passed_before, sent)


async def _counts(link: FaultProxy, capture: Capture) -> tuple[Sent, int]:
    """Counts of capture and proxy, once they agree; at the latest after `SETTLES_S`."""
    deadline_s = time.monotonic() + SETTLES_S
    while True:
        sent, passed = capture.sent(), link.num_passed[Way.THERE]
        if sent.payload_bytes == passed or time.monotonic() > deadline_s:
            return sent, passed
        await asyncio.sleep(0.05)


async def _until_nothing_is_held(client: AsyncClient) -> None:
    while True:
        workers = (await client.model()).workers
        if not any(worker.num_leased_blocks or worker.num_in_flight for worker in workers):
            return
        await asyncio.sleep(0.05)


def table_of(rows: list[Row]) -> str:
    headings = ("", "KV of the prompt", "Proxy", "Capture", "Sent again", "With headers", "Packets")
    return table(
        headings,
        [
            (
                f"{row.kind} {row.number}",
                *(f"{count:,}" for count in (row.kv_bytes, row.proxy_bytes, *row.sent.as_bytes)),
                str(row.sent.num_packets),
            )
            for row in rows
        ],
    )


def _raise_loopback() -> None:
    """Bring up the loopback of the new namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
        request = struct.pack("16sH14x", b"lo", flags | _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", nargs="?", default=str(BUNDLED_MODEL), metavar="MODEL")
    parser.add_argument("--most", type=int, default=16, help="choices, and beams")
    parser.add_argument("--is-inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.is_inside:
        users = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        again = [sys.executable, "-m", "bench.kv_capture", "--is-inside", *sys.argv[1:]]
        return subprocess.run(["unshare", *users, "--net", *again], check=False).returncode
    _raise_loopback()
    rows = asyncio.run(measure(arguments.model, arguments.most))
    Console().print(table_of(rows), soft_wrap=True)
    return 0 if all(row.is_sound for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
