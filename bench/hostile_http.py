"""What other clients of a gateway notice of hostile ones at its HTTP port.

    python -m bench.hostile_http [--before CHECKOUT] [--rounds 2]

Attacks: connections that each send most of the largest allowed body and stop ("bodies"), and
streaming requests opened at once, each over a connection of its own ("streams"). The attacker is a
process on the gateway's core or on another. Meanwhile /health is asked over new connections, and
gRPC streams get a token each 5 ms. Printed per attack: times of /health, the longest gap of any
stream, and the longest CPU time of one turn of the gateway's event loop. --before also measures the
gateway of another checkout, by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from baton.rpc.channel import aio_channel
from baton.supervisor import Cluster
from bench.long_texts import Silences, Turns, gateway_of_a_long_model
from bench.machine import describe_machine
from bench.threads import pin

#: Cores of the gateway and of an attacker elsewhere.
GATEWAY_CORE, OTHER_CORE = 0, 1
_HEALTH_S, _ALONE_S = 0.02, 4.0
_HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Attack:
    """num: connections. size: bytes of body that each sends, of `length`; or 0 for streams.
    seconds: how long they are held."""

    num: int
    size: int
    length: int
    seconds: float

    def __str__(self) -> str:
        what = f"bodies of {self.size / 1e6:g} MB" if self.size else "streams"
        return f"{self.num} {what}"

    def request(self) -> bytes:
        if self.size:
            body, length = b" " * self.size, self.length
        else:
            body = json.dumps({"prompt": "a b c", "max_tokens": 50, "stream": True}).encode()
            length = len(body)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n"
        return head.encode() + body


async def attack(asked: Attack, host: str, port: int) -> Counter[str]:
    """Connections by the status that they got."""
    ends: Counter[str] = Counter()
    request = memoryview(asked.request())
    loop = asyncio.get_running_loop()

    async def one() -> None:
        end = "no answer"
        with socket.socket() as connection:
            connection.setblocking(False)
            with suppress(TimeoutError):
                async with asyncio.timeout(asked.seconds):
                    try:
                        await loop.sock_connect(connection, (host, port))
                        await loop.sock_sendall(connection, request)
                        end = (await loop.sock_recv(connection, 64))[9:12].decode() or "closed"
                        while await loop.sock_recv(connection, 65_536):
                            pass
                    except ConnectionError:
                        end = end if end.isdecimal() else "reset"
        ends[end] += 1

    await asyncio.gather(*(one() for _ in range(asked.num)))
    return ends


@dataclass(slots=True)
class Health:
    """Asks /health over a new connection at a fixed pace. num_bad: answers other than 200."""

    times_s: list[float] = field(default_factory=list)
    num_bad: int = 0

    async def ask(self, host: str, port: int) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._one(host, port))
                await asyncio.sleep(_HEALTH_S)

    async def _one(self, host: str, port: int) -> None:
        begin_s = time.perf_counter()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(_HEALTH)
        answer = await reader.read()
        self.times_s.append(time.perf_counter() - begin_s)
        writer.close()
        self.num_bad += not answer.startswith(b"HTTP/1.1 200")

    def row(self) -> str:
        times_ms = sorted(each * 1e3 for each in self.times_s)
        p99 = times_ms[int(0.99 * (len(times_ms) - 1))]
        row = f"{times_ms[len(times_ms) // 2]:.0f} | {p99:.0f} | {times_ms[-1]:.0f}"
        row += f" | {self.num_bad}"
        self.times_s.clear()
        self.num_bad = 0
        return row


@dataclass(slots=True)
class Streams:
    """Endless streams; one that fails is opened anew. num_failed: since the last report."""

    silences: Silences = field(default_factory=Silences)
    num_failed: int = 0

    async def listen(self, channel: grpc.aio.Channel) -> None:
        while True:
            with suppress(grpc.aio.AioRpcError):
                await self.silences.listen(channel)
            self.num_failed += 1
            await asyncio.sleep(0.1)

    def row(self) -> str:
        row = f"{self.silences.take_ms():.0f} | {self.num_failed}"
        self.num_failed = 0
        return row


async def attack_elsewhere(asked: Attack, address: str, core: int) -> str:
    """`attack` in a process on a core; returns its result."""
    sizes = (str(each) for each in (asked.num, asked.size, asked.length, asked.seconds))
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.hostile_http", "--attack", address, str(core), *sizes),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await child.communicate()
    return output.decode().strip()


async def measure(
    cluster: Cluster, turns: Turns, attacks: Sequence[Attack], num_streams: int, name: str
) -> None:
    """Print a row per attack and core. turns: of the cluster's gateway."""
    streams, health = Streams(), Health()
    host, _, port = cluster.http_address.rpartition(":")
    pin(cluster.pid_of("gateway"), {GATEWAY_CORE})
    async with aio_channel(cluster.address) as channel, asyncio.TaskGroup() as group:
        jobs = [group.create_task(streams.listen(channel)) for _ in range(num_streams)]
        jobs.append(group.create_task(health.ask(host, int(port))))
        await asyncio.sleep(1.0)

        async def row(what: str, core: str, seconds: float, outcome: str) -> None:
            print(
                f"| {what} | {core} | {name} | {health.row()} | {streams.row()} "
                f"| {turns.take_ms():.0f} | {seconds:.1f} | {outcome} |",
                flush=True,
            )

        health.times_s.clear()
        streams.row()
        turns.take_ms()
        await asyncio.sleep(_ALONE_S)
        await row("none", "", _ALONE_S, "")
        for asked in attacks:
            for core in (OTHER_CORE, GATEWAY_CORE):
                begin_s = time.perf_counter()
                outcome = await attack_elsewhere(asked, cluster.http_address, core)
                await asyncio.sleep(0.5)
                where = "the same" if core == GATEWAY_CORE else "another"
                await row(str(asked), where, time.perf_counter() - begin_s, outcome)
        for job in jobs:
            job.cancel()


def gateway_of(checkout: str) -> tuple[str, ...]:
    """Command of a checkout's gateway."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {checkout!r}); "
        "runpy.run_module('bench.timed_gateway', run_name='__main__', alter_sys=True)"
    )
    return sys.executable, "-c", code


async def run(
    contenders: Sequence[tuple[str, str]], attacks: Sequence[Attack], rounds: int, num_streams: int
) -> None:
    """contenders: names and checkouts."""
    print(
        "| Attack | Attacker's core | Gateway | /health p50, ms | p99 | longest | not 200 "
        "| Longest silence, ms | Streams failed | Longest turn, ms | Seconds | Attacker got |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for name, checkout in list(contenders) * rounds:
        with tempfile.TemporaryDirectory() as folder:
            turns = Turns()
            command = gateway_of(checkout)
            async with gateway_of_a_long_model(Path(folder), turns, command) as cluster:
                await measure(cluster, turns, attacks, num_streams, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bodies", type=int, default=200, help="connections that send bodies")
    parser.add_argument("--body-bytes", type=int, default=15_900_000, help="that each sends")
    parser.add_argument("--streams", type=int, default=1000, help="requests opened at once")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each attack, at most")
    parser.add_argument("--num-streams", type=int, default=8, help="of others")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--before", help="another checkout")
    parser.add_argument("--attack", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        address, core, num, size, length, seconds = arguments.attack
        os.sched_setaffinity(0, {int(core)})
        host, _, port = address.rpartition(":")
        asked = Attack(int(num), int(size), int(length), float(seconds))
        ends = asyncio.run(attack(asked, host, int(port)))
        print(", ".join(f"{number} {end}" for end, number in ends.most_common()))
        return
    attacks = (
        Attack(arguments.bodies, arguments.body_bytes, 16_000_000, arguments.seconds),
        Attack(arguments.streams, 0, 0, arguments.seconds),
    )
    contenders = [("this", str(Path(__file__).parent.parent))]
    if arguments.before:
        contenders.insert(0, ("before", arguments.before))
    print(describe_machine())
    asyncio.run(run(contenders, attacks, arguments.rounds, arguments.num_streams))


if __name__ == "__main__":
    main()
