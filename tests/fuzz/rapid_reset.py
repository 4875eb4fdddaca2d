"""What other clients of a gateway notice of one that opens HTTP/2 streams and resets them.

    python -m tests.fuzz.rapid_reset [--rates 1000,10000,100000] [--seconds 5]

The attacker is a process that resets streams at a fixed rate over four connections, on the
gateway's core or on another. Meanwhile a client makes a call each 50 ms, which it never retries,
and gRPC streams get a token each 5 ms. Printed per rate and core: resets sent, calls that failed,
the time to their first tokens, and the longest gap of any stream.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from baton.client import AsyncClient, SamplingParams
from baton.errors import BatonError
from baton.rpc.channel import aio_channel
from baton.supervisor import Cluster
from bench.hostile_http import GATEWAY_CORE, OTHER_CORE, Streams
from bench.long_texts import Turns, gateway_of_a_long_model
from bench.machine import describe_machine
from bench.threads import pin
from tests.support.http2 import (
    ACK,
    CANCEL,
    END_HEADERS,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    header_block,
)

_NUM_CONNECTIONS = 4
_CALL_S = 0.05
_PATH = "/baton.v1.InferenceService/Generate"


async def reset_streams(host: str, port: int, rate: float, until_s: float) -> int:
    """Reset `rate` streams a second on one connection; returns how many were sent."""
    reader, writer = await asyncio.open_connection(host, port)
    reading = asyncio.create_task(reader.read())
    writer.write(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(SETTINGS, ACK, 0, b""))
    headers, reset = header_block(_PATH), struct.pack(">I", CANCEL)
    begin_s, num = time.monotonic(), 0
    with suppress(ConnectionError):
        while time.monotonic() < until_s and not reading.done():
            due = int((time.monotonic() - begin_s) * rate) - num
            for _ in range(min(due, 500)):
                stream, num = 2 * num + 1, num + 1
                writer.write(
                    frame(HEADERS, END_HEADERS, stream, headers)
                    + frame(RST_STREAM, 0, stream, reset)
                )
            await writer.drain()
            await asyncio.sleep(0.001)
    writer.transport.abort()
    await asyncio.gather(reading, return_exceptions=True)
    return num


async def attack(address: str, rate: float, seconds: float) -> int:
    host, _, port = address.rpartition(":")
    until_s = time.monotonic() + seconds
    share = rate / _NUM_CONNECTIONS
    jobs = (reset_streams(host, int(port), share, until_s) for _ in range(_NUM_CONNECTIONS))
    return sum(await asyncio.gather(*jobs))


class Polite:
    """Calls at a fixed pace, each for one token."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._times_s: list[float] = []
        self._failures: Counter[str] = Counter()

    async def call(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._one())
                await asyncio.sleep(_CALL_S)

    async def _one(self) -> None:
        begin_s = time.perf_counter()
        try:
            await self._client.generate([1, 2, 3], SamplingParams(max_tokens=1))
        except BatonError as error:
            self._failures[error.reason] += 1
        self._times_s.append(time.perf_counter() - begin_s)

    def row(self) -> str:
        times_ms = sorted(each * 1e3 for each in self._times_s)
        p99 = times_ms[int(0.99 * (len(times_ms) - 1))]
        reasons = ", ".join(self._failures)
        row = f"{len(times_ms)} | {self._failures.total()} {reasons} | "
        row += f"{times_ms[len(times_ms) // 2]:.0f} | {p99:.0f}"
        self._times_s.clear()
        self._failures.clear()
        return row


async def measure(cluster: Cluster, rates: Sequence[int], seconds: float, num_streams: int) -> None:
    """Print a row per rate and core."""
    pin(cluster.pid_of("gateway"), {GATEWAY_CORE})
    streams = Streams()
    async with (
        aio_channel(cluster.address) as channel,
        AsyncClient(cluster.address, max_retries=0) as client,
        asyncio.TaskGroup() as group,
    ):
        polite = Polite(client)
        jobs = [group.create_task(streams.listen(channel)) for _ in range(num_streams)]
        jobs.append(group.create_task(polite.call()))
        await asyncio.sleep(1.0)
        polite.row()
        streams.row()
        for rate, core in ((0, OTHER_CORE), *((r, c) for r in rates for c in (1, 0))):
            sent = await _attack_elsewhere(cluster.address, rate, seconds, core)
            await asyncio.sleep(0.5)
            where = "the same" if core == GATEWAY_CORE else "another"
            row = f"| {rate:,} | {where} | {sent} | {polite.row()} | {streams.row()} |"
            print(row, flush=True)
        for job in jobs:
            job.cancel()


async def _attack_elsewhere(address: str, rate: int, seconds: float, core: int) -> str:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fuzz.rapid_reset", "--attack", address, str(core)),
        *("--rates", str(rate), "--seconds", str(seconds)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await child.communicate()
    return output.decode().strip()


async def run(rates: Sequence[int], seconds: float, num_streams: int) -> None:
    print(
        "| Resets/s | Attacker's core | Sent | Calls | Failed | First token p50, ms | p99 "
        "| Longest silence, ms | Streams failed |\n|---|---|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        async with gateway_of_a_long_model(Path(folder), Turns()) as cluster:
            await measure(cluster, rates, seconds, num_streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", default="1000,10000,100000", help="resets a second")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--num-streams", type=int, default=8, help="of others")
    parser.add_argument("--attack", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rates = [int(rate) for rate in arguments.rates.split(",")]
    if arguments.attack:
        address, core = arguments.attack
        os.sched_setaffinity(0, {int(core)})
        print(asyncio.run(attack(address, rates[0], arguments.seconds)))
        return
    print(describe_machine())
    asyncio.run(run(rates, arguments.seconds, arguments.num_streams))


if __name__ == "__main__":
    main()
