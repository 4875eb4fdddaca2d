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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.supervisor import Cluster
from baton.supervisor.log_lines import forward_to_stderr
from baton.supervisor.plan import ChildSpec
from baton.v1 import sequence_pb2, sequence_service_pb2
from bench.machine import BUNDLED_MODEL
from bench.oracle_requests import draw_request
from tests.fuzz.raw_clients import NO_STATUS, GrpcConnection, HttpConnection, grpc_frame
from tests.support.metrics_page import free_ports

CORPUS = Path(__file__).parent / "corpus"
CONCURRENCY = 8

#: Calls at once of each connection, and messages of a call that takes many.
AT_ONCE, MESSAGES_AT_ONCE = 8, 64

#: A call's deadline; and after how long without an answer its server is taken to be silent.
CALL_S, SILENT_S = 10, 60.0
DOORS = (
    "gateway, gRPC",
    "gateway, HTTP",
    "prefill worker, gRPC",
    "decode worker, gRPC",
    "decode worker, KV over tcp",
)
#: How much more memory a process may take than early in the run, in MiB.
MAX_GROWTH_MIB = 64.0

_BAD_CODES = frozenset({"INTERNAL", "UNKNOWN", "UNAVAILABLE", NO_STATUS})
_SERVE = "/baton.v1.SequenceService/Serve"

#: What a mutation makes of the number of choices, each of which has a handle, is below this.
_HANDLE_BITS = 32
#: By the corpus's letter.
_HTTP_PATHS = {
    b"c": "/v1/chat/completions",
    b"m": "/v1/messages",
    b"r": "/v1/responses",
    b"x": "/v1/completions",
}

#: Python's own, and those that baton.rpc.interceptor logs, which leave messages out.
_TRACEBACK = re.compile(r'Traceback|File \\?"')


class Knocker(Protocol):
    """Makes malformed calls at one door. Owns its connection."""

    async def knock(self, rng: random.Random) -> Mapping[str, int]:
        """How many ended how, "!" before it if none may end so."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Door:
    """One of them. make: a knocker. ends: how many calls ended how."""

    name: str
    make: Callable[[], Knocker]
    ends: Counter[str] = field(default_factory=Counter)

    async def knock(self, rng: random.Random, until_s: float, most: float) -> None:
        """Until a time, or until there were `most` calls."""
        knocker = self.make()
        try:
            while time.monotonic() < until_s and self.ends.total() < most:
                self.ends.update(await knocker.knock(rng))
        finally:
            knocker.close()

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


class GrpcKnocker:
    """Calls at once on a connection of its own, of one message each; and, in between, calls of many
    messages that are read to their end, if it has any."""

    def __init__(
        self, port: int, seeds: Sequence[tuple[str, bytes]], openings: Sequence[bytes] = ()
    ) -> None:
        """seeds: a method's path and a message. openings: commands to a worker."""
        self._port = port
        self._seeds = seeds
        self._openings = openings
        self._connection: GrpcConnection | None = None

    async def knock(self, rng: random.Random) -> Counter[str]:
        knocks = [self._one(*rng.choice(self._seeds), rng) for _ in range(AT_ONCE)]
        if self._openings:
            knocks.append(self._many(rng))
        ends: Counter[str] = Counter()
        for each in await asyncio.gather(*knocks):
            ends.update(each)
        return ends

    async def _one(self, path: str, seed: bytes, rng: random.Random) -> Counter[str]:
        # The first piece of an answer is enough: it may have become right, and go on for long.
        message = grpc_frame(mutated(rng, seed))
        return Counter([await self._call(path, message, is_whole=False)])

    async def _many(self, rng: random.Random) -> Counter[str]:
        """Messages with numbers of their own. A stream ends with anything else, or with an earlier
        message's number, and the rest is not read."""
        messages = []
        for number in range(MESSAGES_AT_ONCE):
            message = sequence_service_pb2.ServeRequest()
            with suppress(DecodeError):
                message.ParseFromString(mutated(rng, rng.choice(self._openings)))
            if message.HasField("open"):
                message.open.handle = number << _HANDLE_BITS
                messages.append(grpc_frame(message.SerializeToString()))
        end = await self._call(_SERVE, b"".join(messages), is_whole=True)
        return Counter({end: len(messages) if end == "OK" else 1})

    async def _call(self, path: str, messages: bytes, *, is_whole: bool) -> str:
        """How it ended, "!" before it if it may not end so."""
        if self._connection is None or not self._connection.is_open:
            _, self._connection = await asyncio.get_running_loop().create_connection(
                GrpcConnection, "127.0.0.1", self._port
            )
        try:
            async with asyncio.timeout(SILENT_S):
                end = await self._connection.call(
                    path, messages, is_whole=is_whole, timeout_s=CALL_S
                )
        except TimeoutError:
            return "!silent"
        except OSError:
            return "cut off"
        return f"!{end}" if end in _BAD_CODES else end

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class HttpKnocker:
    """Requests one after the other on a connection of its own; some with their heads malformed,
    each of which is its connection's last."""

    def __init__(self, address: str, seeds: Sequence[bytes]) -> None:
        host, _, port = address.rpartition(":")
        self._host = host
        self._seeds = seeds
        self._connection = HttpConnection(host, int(port))

    async def knock(self, rng: random.Random) -> Counter[str]:
        seed = rng.choice(self._seeds)
        body = mutated(rng, seed[1:])
        head = (
            f"POST {_HTTP_PATHS[seed[:1]]} HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode() + body
        if is_last := rng.random() < 0.1:
            request = mutated(rng, request)
        try:
            async with asyncio.timeout(SILENT_S):
                line = await self._connection.send(request, is_last=is_last)
        except TimeoutError:
            end = "!silent"
        except (OSError, asyncio.IncompleteReadError):
            end = "hung up"
        else:
            is_answer = line.startswith(b"HTTP/")
            status = line.split(b" ")[1].decode() if is_answer else "hung up"
            end = f"{'!' * status.startswith('5')}{status}"
        if is_last or not end.startswith(("2", "4")):
            self._connection.close()
        return Counter([end])

    def close(self) -> None:
        self._connection.close()


class KvKnocker:
    """A connection for each: the receiver hangs up at the first frame that is wrong."""

    def __init__(self, port: int, seeds: Sequence[bytes]) -> None:
        self._port = port
        self._seeds = seeds

    async def knock(self, rng: random.Random) -> Counter[str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(mutated(rng, rng.choice(self._seeds)))
            with suppress(OSError):
                writer.write_eof()
                await asyncio.wait_for(reader.read(), SILENT_S)
        except TimeoutError:
            return Counter(["!silent"])
        finally:
            writer.transport.abort()
        return Counter(["hung up"])

    def close(self) -> None:
        """Nothing is left open."""


def doors_of(cluster: DoorCluster) -> list[Door]:
    """Drain and SetRole are left out: what parses does what it says."""
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
    inner = [(_SERVE, message) for message in opens]
    inner += [
        (f"/baton.v1.WorkerService/{name}", b"\x08\x01")
        for name in ("GetWorkerInfo", "WatchLoad", "ListBlocks")
    ]
    ports = {name: int(cluster.address_of(name).rpartition(":")[2]) for name in cluster.names}
    makers: list[Callable[[], Knocker]] = [
        partial(GrpcKnocker, ports["gateway"], requests),
        partial(HttpKnocker, cluster.http_address, seeds_of("http_bodies")),
        partial(GrpcKnocker, ports["prefill-0"], inner, opens),
        partial(GrpcKnocker, ports["decode-0"], inner, opens),
        partial(KvKnocker, cluster.kv_port, seeds_of("kv_frames")),
    ]
    return [Door(name, make) for name, make in zip(DOORS, makers, strict=True)]


class DoorCluster(Cluster):
    """Its log lines are kept, and the decode worker's KV port is known."""

    def __init__(self, options: ServeOptions) -> None:
        super().__init__(options, on_line=self._take_line)
        self.log_lines: list[str] = []
        (self.kv_port,) = free_ports(1)

    def _take_line(self, name: str, line: str) -> None:
        self.log_lines.append(line)
        forward_to_stderr(name, line)

    async def _start_all(
        self, workers: tuple[ChildSpec, ...], gateways: tuple[ChildSpec, ...]
    ) -> None:
        kv_port = f"--kv-port={self.kv_port}"
        known = [
            replace(spec, arguments=(kv_port, *spec.arguments)) if spec.name == "decode-0" else spec
            for spec in workers
        ]
        await super()._start_all(tuple(known), gateways)


def memory_mib(cluster: DoorCluster) -> dict[str, float]:
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


async def knock_at(
    names: Sequence[str], seconds: float, seed: int, num_calls: float = inf
) -> Report:
    """names: of `DOORS`, all at once. num_calls: of each, at most."""
    options = ServeOptions(
        model=BUNDLED_MODEL,
        engine="oracle",
        generation_config="none",
        num_gpu_blocks_override=2000,
        kv_transport="tcp",
        port=0,
        log_level="warning",
    )
    async with DoorCluster(options) as cluster, AsyncClient(cluster.address) as client:
        pids = {name: cluster.pid_of(name) for name in cluster.names}
        doors = [door for door in doors_of(cluster) if door.name in names]
        rng = random.Random(seed)
        start_s = time.monotonic()

        async def knock(until_s: float, most: float) -> dict[str, float]:
            knocks = (
                door.knock(random.Random(rng.random()), until_s, most)
                for door in doors
                for _ in range(CONCURRENCY)
            )
            await asyncio.gather(*knocks)
            return memory_mib(cluster)

        early = await knock(start_s + seconds / 10, num_calls / 10)
        late = await knock(start_s + seconds, num_calls)
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
        deadline_s = time.monotonic() + SILENT_S
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
    parser.add_argument("--calls", type=int, default=1_000_000, help="at each door, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--door", action="append", choices=DOORS, help="all if none is given")
    arguments = parser.parse_args()
    report = asyncio.run(
        knock_at(
            arguments.door or DOORS, arguments.seconds, arguments.seed, num_calls=arguments.calls
        )
    )
    print(*report.rows(), *report.wrong, sep="\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
