"""Gateway memory that ended streams leave behind, by kind of end, beside a bare gRPC server.

    python -m bench.stream_memory [--num-streams 10000] [--kind "cancelled, gRPC" ...]

A gateway before a token source (bench.token_source). The source's process is also the bare server,
which answers the same calls with only its protocol. Kinds of streams follow each other, 16 streams
at a time; resident memory is read after every twentieth of them, and a line is fitted by least
squares from the first fifth on. The router remembers 1,024 prefixes, so its memory is full by then.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio

from baton.config import ServeOptions
from baton.rpc.channel import aio_channel
from baton.supervisor import Cluster
from baton.supervisor.plan import PROGRAMS, Programs
from baton.v1 import inference_pb2, inference_pb2_grpc
from bench.host_gateway import SOURCE
from bench.machine import BUNDLED_MODEL

CONCURRENCY = 16
NUM_PREFIXES = 1024
NUM_SAMPLES, NUM_WARM_UP = 20, 4
#: Tokens of streams that are read to the end, and of streams that are abandoned.
_FEW_TOKENS, _MANY_TOKENS = 4, 400
_SHORT, _LONG = 20, 300
_VOCAB = 1000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

#: One stream of a prompt.
Stream = Callable[[Sequence[int]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Kind:
    """pid: process to measure. num_prompt_tokens: length of each stream's unique prompt."""

    name: str
    pid: int
    stream: Stream
    num_prompt_tokens: int = _SHORT


@dataclass(frozen=True, slots=True)
class RetainedMemory:
    """bytes_each: by the fitted line. begin_mib, end_mib: resident memory after the warm-up, and at
    the end."""

    kind: str
    num_streams: int
    bytes_each: float
    begin_mib: float
    end_mib: float

    def row(self) -> str:
        return (
            f"| {self.kind} | {self.num_streams:,} | {self.bytes_each:.0f} "
            f"| {self.begin_mib:.1f} | {self.end_mib:.1f} |"
        )


def _request(prompt: Sequence[int], max_tokens: int) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.prompt.token_ids.ids.extend(prompt)
    request.sampling.max_tokens = max_tokens
    request.sampling.ignore_eos = True
    return request


async def finished(channel: grpc.aio.Channel, prompt: Sequence[int]) -> None:
    """All of it is read."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    async for _ in stub.Generate(_request(prompt, _FEW_TOKENS)):
        pass


async def cancelled(channel: grpc.aio.Channel, prompt: Sequence[int]) -> None:
    """After its first chunk."""
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(_request(prompt, _MANY_TOKENS))
    await call.read()
    call.cancel()


async def finished_alone(address: str, prompt: Sequence[int]) -> None:
    """On a connection of its own."""
    async with aio_channel(address) as channel:
        await finished(channel, prompt)


async def broken(address: str, prompt: Sequence[int]) -> None:
    """Its connection is closed after the first chunk."""
    async with aio_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await stub.Generate(_request(prompt, _MANY_TOKENS)).read()


async def over_http(address: str, is_broken: bool, prompt: Sequence[int]) -> None:
    """On a connection of its own, which is reset after the first event if it is to be broken."""
    body = json.dumps(
        {
            "prompt": [*prompt],
            "stream": True,
            "max_tokens": _MANY_TOKENS if is_broken else _FEW_TOKENS,
            "ignore_eos": True,
        }
    ).encode()
    host, _, port = address.rpartition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
        await (reader.readuntil(b"data: ") if is_broken else reader.read())
    finally:
        writer.transport.abort()


async def retained_by(kind: Kind, num_streams: int) -> RetainedMemory:
    prompts = new_prompts(kind.num_prompt_tokens)
    num_each = num_streams // NUM_SAMPLES
    sizes = []
    for _ in range(NUM_SAMPLES):
        left = iter(range(num_each))

        async def go_on(left: Iterator[int] = left) -> None:
            for _ in left:
                await kind.stream(next(prompts))

        await asyncio.gather(*(go_on() for _ in range(CONCURRENCY)))
        sizes.append(resident_bytes(kind.pid))
    steady = sizes[NUM_WARM_UP:]
    line = statistics.linear_regression([num_each * i for i in range(len(steady))], steady)
    return RetainedMemory(kind.name, num_streams, line.slope, steady[0] / 2**20, steady[-1] / 2**20)


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * _PAGE_BYTES


def new_prompts(num_tokens: int) -> Iterator[tuple[int, ...]]:
    """Prompts without common prefixes."""
    for number in itertools.count():
        yield (number % _VOCAB, number // _VOCAB, *(i % _VOCAB for i in range(num_tokens - 2)))


def kinds_of(cluster: Cluster, gateway: grpc.aio.Channel, bare: grpc.aio.Channel) -> list[Kind]:
    """gateway, bare: channels to the gateway and to the bare server."""
    of_gateway, of_bare = cluster.pid_of("gateway"), cluster.pid_of("decode-0")
    http, bare_address = cluster.http_address, cluster.address_of("decode-0")
    return [
        Kind("finished, gRPC", of_gateway, partial(finished, gateway)),
        Kind("finished, gRPC, long prompts", of_gateway, partial(finished, gateway), _LONG),
        Kind("finished, HTTP", of_gateway, partial(over_http, http, False)),
        Kind("finished, each its own gRPC connection", of_gateway,
             partial(finished_alone, cluster.address)),
        Kind("broken connection, HTTP", of_gateway, partial(over_http, http, True)),
        Kind("cancelled, gRPC", of_gateway, partial(cancelled, gateway)),
        Kind("cancelled, bare gRPC server", of_bare, partial(cancelled, bare)),
        Kind("broken connection, gRPC", of_gateway, partial(broken, cluster.address)),
        Kind("broken connection, bare gRPC server", of_bare, partial(broken, bare_address)),
    ]  # fmt: skip


async def measure(names: Sequence[str], num_streams: int) -> None:
    """Prints a row for each kind. names: of those that are wanted; all if there are none."""
    options = ServeOptions.model_validate(
        {
            "model": BUNDLED_MODEL,
            "engine": "oracle",
            "oracle_step_ms": 1.0,
            "num_speculative_tokens": 1,
            "colocated": True,
            "num_decode_workers": 1,
            "max_num_seqs": 4 * CONCURRENCY,
            "max_remembered_prefixes": NUM_PREFIXES,
            "port": 0,
            "log_level": "error",
        }
    )
    programs = Programs(PROGRAMS.prefill, SOURCE, PROGRAMS.gateway)
    async with (
        Cluster(options, programs=programs) as cluster,
        aio_channel(cluster.address) as gateway,
        aio_channel(cluster.address_of("decode-0")) as bare,
    ):
        print("| Streams | Number | Bytes left by each | MiB | to MiB |\n|---|---|---|---|---|")
        for kind in kinds_of(cluster, gateway, bare):
            if not names or kind.name in names:
                left = await retained_by(kind, num_streams)
                print(left.row(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-streams", type=int, default=10_000, help="of each kind")
    parser.add_argument("--kind", action="append", default=[], help="all if none is given")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.kind, arguments.num_streams))


if __name__ == "__main__":
    main()
