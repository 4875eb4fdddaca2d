"""Clients that never read: each is ended in time, and what it held is free again.

    python -m tests.fuzz.readers --sse 1000 --grpc 1000

Serves oracle engines. Each client opens a connection with a receive buffer of 4 KiB, asks for a
long stream, and reads nothing until no worker holds a block; then it reads what is left. Prints how
the streams ended, and when the last block was free. Status 1: a stream was whole, or one lasts, or
blocks were held for longer than the time of all waves of streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.supervisor import Cluster
from baton.v1 import inference_pb2
from bench.machine import BUNDLED_MODEL
from tests.fuzz.raw_clients import GrpcConnection, grpc_frame

RECEIVE_BYTES = 4096
STALL_S, NUM_TOKENS, STEP_MS = 3.0, 6000, 2.0

#: Streams at once: a decode worker's default.
WAVE = 64

#: Seconds that a stream may take to fill all buffers, and to be noticed, beside STALL_S.
SLACK_S = 20.0
_GENERATE = "/baton.v1.InferenceService/Generate"
_WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Report:
    """ends: streams by how they ended. free_s: from the first request until all blocks were free.
    allowed_s: maximum of free_s."""

    ends: Counter[str]
    free_s: float
    allowed_s: float

    @property
    def is_sound(self) -> bool:
        return self.free_s < self.allowed_s and not self.ends[_WHOLE] and not self.ends["silent"]


def connected(address: str) -> socket.socket:
    """A connection with a small receive buffer."""
    host, _, port = address.rpartition(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    made.connect((host, int(port)))
    made.setblocking(False)
    return made


async def stop_sse(address: str, go_on: asyncio.Event) -> str:
    """How the stream ended once it was read again."""
    body = json.dumps(
        {"prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    with connected(address) as stream:
        await loop.sock_sendall(stream, (head + body).encode())
        await go_on.wait()
        last = b""
        try:
            while data := await loop.sock_recv(stream, 2**16):
                last = (last + data)[-64:]
        except ConnectionResetError:
            return "reset"
    return _WHOLE if b"[DONE]" in last else "closed"


async def stop_grpc(address: str, go_on: asyncio.Event) -> str:
    """How the call ended once it was read again."""
    request = inference_pb2.GenerateRequest()
    request.prompt.token_ids.ids.extend((1, 2, 3))
    request.sampling.max_tokens = NUM_TOKENS
    request.sampling.ignore_eos = True
    transport, connection = await asyncio.get_running_loop().create_connection(
        GrpcConnection, sock=connected(address)
    )
    transport.pause_reading()
    message = grpc_frame(request.SerializeToString())
    call = asyncio.create_task(connection.call(_GENERATE, message, is_whole=True, timeout_s=600))
    await go_on.wait()
    transport.resume_reading()
    try:
        end = await call
    except OSError:
        return "reset"
    finally:
        connection.close()
    return _WHOLE if end == "OK" else end


async def until_free(client: AsyncClient, allowed_s: float) -> float:
    """Seconds until no worker holds a block or request, at most allowed_s."""
    begin_s = time.monotonic()
    num_free = 0
    while num_free < 5 and time.monotonic() - begin_s < allowed_s:  # queued ones follow at once
        workers = (await client.model()).workers
        is_free = not any(w.num_leased_blocks or w.num_in_flight for w in workers)
        num_free = num_free + 1 if is_free else 0
        await asyncio.sleep(0.1)
    return time.monotonic() - begin_s


async def stop_reading(num_sse: int, num_grpc: int) -> Report:
    """Run that many readers of each kind against a server of their own."""
    options = ServeOptions(
        model=BUNDLED_MODEL,
        engine="oracle",
        oracle_step_ms=STEP_MS,
        generation_config="none",
        num_gpu_blocks_override=200_000,
        max_model_len=2 * NUM_TOKENS,
        client_stall_timeout_s=STALL_S,
        max_queue_size=num_sse + num_grpc,
        port=0,
        log_level="error",
    )
    num_waves = -(-(num_sse + num_grpc) // WAVE)
    allowed_s = num_waves * (STALL_S + SLACK_S)
    go_on = asyncio.Event()
    async with Cluster(options) as cluster, AsyncClient(cluster.address) as client:
        readers = [
            *(asyncio.create_task(stop_sse(cluster.http_address, go_on)) for _ in range(num_sse)),
            *(asyncio.create_task(stop_grpc(cluster.address, go_on)) for _ in range(num_grpc)),
        ]
        await asyncio.sleep(1.0)
        free_s = await until_free(client, allowed_s)
        go_on.set()
        done, silent = await asyncio.wait(readers, timeout=10)
        for reader in silent:
            reader.cancel()
        ends = Counter(reader.result() for reader in done)
        ends["silent"] = len(silent)
    return Report(+ends, free_s, allowed_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sse", type=int, default=50, help="readers of server-sent events")
    parser.add_argument("--grpc", type=int, default=50, help="readers of gRPC streams")
    arguments = parser.parse_args()
    report = asyncio.run(stop_reading(arguments.sse, arguments.grpc))
    ends = ", ".join(f"{number} {end}" for end, number in report.ends.most_common())
    print(f"{ends}; blocks free after {report.free_s:.1f} s of {report.allowed_s:.0f} s")
    return 0 if report.is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
