"""Malformed calls at the doors of real processes: each is refused, and nobody dies of one.

    python -m tests.fuzz.doors --seconds 600
    python -m tests.fuzz.doors --door "gateway, HTTP" --seconds 600    one of them

Serves oracle engines, and sends what it makes of tests/fuzz/corpus (bits flipped, parts cut out,
doubled, or replaced) for so long to each door at once: the gateway's gRPC and HTTP, the workers'
gRPC, and the decode worker's KV port. Prints a row for each door, and one for each process, with
its memory after a tenth of the time and at the end. Status 1: a call ended with
INTERNAL, UNKNOWN, UNAVAILABLE or a 5xx, or a process died, or logged a traceback, or takes 64 MiB
more than after the first tenth of the time; or afterwards a right request is not answered rightly,
or something is held.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.rpc.channel import aio_channel
from baton.rpc.status import BROKEN_AT_ITS_BEGINNING
from baton.v1 import sequence_pb2, sequence_service_pb2
from bench.fault_proxy import ProxiedCluster
from bench.machine import BUNDLED_MODEL
from bench.oracle_requests import draw_request

CORPUS = Path(__file__).parent / "corpus"
CONCURRENCY = 8
CALL_S = 10.0
DOORS = (
    "gateway, gRPC",
    "gateway, HTTP",
    "prefill worker, gRPC",
    "decode worker, gRPC",
    "decode worker, KV over tcp",
)
#: How much more memory a process may take than early in the run, in MiB.
MAX_GROWTH_MIB = 64.0

_BAD_CODES = frozenset(
    {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
)
#: By the corpus's letter.
_HTTP_PATHS = {
    b"c": "/v1/chat/completions",
    b"m": "/v1/messages",
    b"r": "/v1/responses",
    b"x": "/v1/completions",
}

#: Python's own, and those that baton.rpc.interceptor logs, which leave messages out.
_TRACEBACK = re.compile(r'Traceback|File \\?"')

Call = Callable[[random.Random], Awaitable[str]]


@dataclass(slots=True)
class Door:
    """One of them. call: makes a malformed call; how it ended, "!" before it if it may not end so.
    ends: how often it ended how."""

    name: str
    call: Call
    ends: Counter[str] = field(default_factory=Counter)

    async def knock(self, rng: random.Random, until_s: float) -> None:
        while time.monotonic() < until_s:
            self.ends[await self.call(rng)] += 1

    @property
    def is_sound(self) -> bool:
        return not any(end.startswith("!") for end in self.ends)

    def row(self) -> str:
        ends = ", ".join(f"{number:,} {end}" for end, number in self.ends.most_common())
        return f"| {self.name} | {self.ends.total():,} | {ends} |"


def mutated(rng: random.Random, seed: bytes) -> bytes:
    """Now and then nothing of the seed is left."""
    data = bytearray(seed)
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(200))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.randint(1, 16))
        match rng.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                data[at:at] = data[at:end] * rng.randint(1, 8)
            case _:
                data[at:end] = b"\xff" * (end - at)
    return bytes(data)


def seeds_of(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def grpc_call(channel: grpc.aio.Channel, seeds: Sequence[tuple[str, bytes]]) -> Call:
    """seeds: a method's path and a message."""

    async def call(rng: random.Random) -> str:
        path, seed = rng.choice(seeds)
        method = channel.stream_stream(path, request_serializer=bytes, response_deserializer=bytes)
        stream = method(timeout=CALL_S)
        try:
            await stream.write(mutated(rng, seed))
            await stream.done_writing()
            # The first of what follows: it may have become right, and go on for long.
            await stream.read()
        except grpc.aio.AioRpcError as error:
            # Neither end's keepalive is answered in time where the machine does too much else.
            details = str(error.details())
            if "ping_timeout" in details or details == BROKEN_AT_ITS_BEGINNING:
                return "cut by keepalive"
            if error.code() in _BAD_CODES:
                return f"!{error.code().name} ({error.details()})"
            return error.code().name
        except grpc.aio.InternalError:
            # What grpc raises where a call ended while its end was being written: it does not say
            # how.
            return "ended while it was written"
        finally:
            stream.cancel()
        return "answered"

    return call


def http_call(address: str, seeds: Sequence[bytes]) -> Call:
    host, _, port = address.rpartition(":")

    async def call(rng: random.Random) -> str:
        seed = rng.choice(seeds)
        body = mutated(rng, seed[1:])
        path = _HTTP_PATHS[seed[:1]]
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n".encode()
        request = head + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body
        if rng.random() < 0.1:
            request = mutated(rng, request)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            writer.write_eof()
            line = await asyncio.wait_for(reader.readline(), CALL_S)
        except OSError:
            return "hung up"
        except TimeoutError:
            return "!silent"
        finally:
            writer.transport.abort()
        status = line.split(b" ")[1].decode() if line.startswith(b"HTTP/") else "hung up"
        return f"{'!' * status.startswith('5')}{status}"

    return call


def kv_call(port: int, seeds: Sequence[bytes]) -> Call:
    async def call(rng: random.Random) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(mutated(rng, rng.choice(seeds)))
            with suppress(OSError):
                writer.write_eof()
                await asyncio.wait_for(reader.read(), CALL_S)
        except TimeoutError:
            return "!silent"
        finally:
            writer.transport.abort()
        return "hung up"

    return call


def doors_of(cluster: ProxiedCluster, channels: Sequence[grpc.aio.Channel]) -> list[Door]:
    """channels: the gateway's, then the workers'. Drain and SetRole are left out: what parses does
    what it says."""
    gateway, *workers = channels
    own = "/baton.v1.InferenceService"
    methods = {b"t": "Tokenize", b"d": "Detokenize"}
    requests = [
        (f"{own}/{methods.get(seed[:1], 'Generate')}", seed[1:]) for seed in seeds_of("requests")
    ]
    requests += [(f"{own}/GetModel", b""), (f"{own}/ListModels", b"")]
    sequences = [
        sequence_pb2.SequenceState.FromString(seed[1:])
        for seed in seeds_of("inner_messages")
        if seed[:1] not in (b"i", b"l", b"s")
    ]
    opens = [
        sequence_service_pb2.ServeRequest(
            open=sequence_service_pb2.OpenSequence(handle=7, sequence=sequence, source=source)
        ).SerializeToString()
        for sequence in sequences
        for source in (1, 2)
    ]
    inner = [("/baton.v1.SequenceService/Serve", message) for message in opens]
    inner += [
        (f"/baton.v1.WorkerService/{name}", b"\x08\x01")
        for name in ("GetWorkerInfo", "WatchLoad", "ListBlocks")
    ]
    calls = [
        grpc_call(gateway, requests),
        http_call(cluster.http_address, seeds_of("http_bodies")),
        *(grpc_call(channel, inner) for channel in workers),
        kv_call(cluster.links["kv decode-0"].port, seeds_of("kv_frames")),
    ]
    return [Door(name, call) for name, call in zip(DOORS, calls, strict=True)]


def memory_mib(cluster: ProxiedCluster) -> dict[str, float]:
    """Resident, of each process."""
    sizes = {}
    for name in cluster.names:
        status = Path(f"/proc/{cluster.pid_of(name)}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
        sizes[name] = int(line.split()[1]) / 1024
    return sizes


@dataclass(frozen=True, slots=True)
class Report:
    """early_mib, late_mib: memory of each process after a tenth of the time, and at the end.
    wrong: in words."""

    doors: list[Door]
    early_mib: dict[str, float]
    late_mib: dict[str, float]
    wrong: list[str]

    def rows(self) -> list[str]:
        memory = [
            f"| {name} | {self.early_mib[name]:.1f} | {late:.1f} |"
            for name, late in self.late_mib.items()
        ]
        return [
            "| Door | Calls | Ended |\n|---|---|---|",
            *(door.row() for door in self.doors),
            "\n| Process | Early, MiB | At the end |\n|---|---|---|",
            *memory,
        ]


async def knock_at(names: Sequence[str], seconds: float, seed: int) -> Report:
    """names: of `DOORS`, all at once."""
    options = ServeOptions(
        model=BUNDLED_MODEL,
        engine="oracle",
        generation_config="none",
        num_gpu_blocks_override=2000,
        kv_transport="tcp",
        port=0,
        log_level="warning",
    )
    async with (
        ProxiedCluster(options) as cluster,
        aio_channel(cluster.address) as gateway,
        aio_channel(cluster.address_of("prefill-0")) as prefill,
        aio_channel(cluster.address_of("decode-0")) as decode,
        AsyncClient(cluster.address) as client,
    ):
        pids = {name: cluster.pid_of(name) for name in cluster.names}
        all_doors = doors_of(cluster, (gateway, prefill, decode))
        doors = [door for door in all_doors if door.name in names]
        rng = random.Random(seed)
        start_s = time.monotonic()

        async def knock(until_s: float) -> dict[str, float]:
            knocks = (
                door.knock(random.Random(rng.random()), until_s)
                for door in doors
                for _ in range(CONCURRENCY)
            )
            await asyncio.gather(*knocks)
            return memory_mib(cluster)

        early = await knock(start_s + seconds / 10)
        late = await knock(start_s + seconds)
        wrong = [f"{name} died" for name, pid in pids.items() if cluster.pid_of(name) != pid]
        wrong += [
            f"{name} grew from {early[name]:.0f} to {late[name]:.0f} MiB"
            for name in late
            if late[name] > early[name] + MAX_GROWTH_MIB
        ]
        wrong += [line for line in cluster.log_lines if _TRACEBACK.search(line)][:1]
        request = draw_request(rng, 200, 40)
        done = await client.generate(request.prompt, request.params)
        right = request.right_output()
        if [choice.token_ids for choice in done.choices] != [tuple(each) for each in right]:
            wrong.append("a right request is not answered rightly")
        deadline_s = time.monotonic() + CALL_S
        while num_held := sum(w.num_leased_blocks for w in (await client.model()).workers):
            if time.monotonic() > deadline_s:
                wrong.append(f"{num_held} blocks are held")
                break
            await asyncio.sleep(0.1)
    wrong += [f"{door.name}: {dict(door.ends)}" for door in doors if not door.is_sound]
    return Report(doors, early, late, wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--door", action="append", choices=DOORS, help="all if none is given")
    arguments = parser.parse_args()
    report = asyncio.run(knock_at(arguments.door or DOORS, arguments.seconds, arguments.seed))
    print(*report.rows(), *report.wrong, sep="\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
