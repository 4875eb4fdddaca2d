"""What telemetry costs: throughput of one set of services with everything on, and of one with it
off, by turns.

    python -m bench.tracing_overhead [--model DIR] [--rounds 20] [--num-requests 24]
        [--concurrency 8]

Both sets run all the time, one of them idle, so that whatever else the machine does falls on both.
Each round drives the same requests through one and then the other, in alternating order. On: every
request traced, spans and metrics exported by OTLP to a sink in this process (a real collector is
elsewhere; the sink only takes bytes), and metrics served on Prometheus ports. Told are medians over
the rounds of the ratio on : off, of tokens a second, and of CPU seconds of the services a token,
which hardly depend on what else runs and bound the loss of throughput of a machine that is full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.client import AsyncClient, SamplingParams
from baton.config import ServeOptions
from baton.supervisor.cluster import Cluster

#: First of the ports that the traced services' metrics are on.
METRICS_PORT = 19464


class Sink(grpc.GenericRpcHandler):
    """Takes every OTLP export and looks at none."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def service(
        self,
        handler_call_details: grpc.HandlerCallDetails,  # noqa: ARG002
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def take(request: bytes, context: object) -> bytes:  # noqa: ARG001
            self.num_bytes += len(request)
            return b""

        return grpc.unary_unary_rpc_method_handler(take)


@asynccontextmanager
async def running_sink() -> AsyncIterator[tuple[Sink, str]]:
    sink, server = Sink(), grpc.aio.server()
    server.add_generic_rpc_handlers((sink,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield sink, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)


@dataclass(frozen=True, slots=True)
class Load:
    num_requests: int
    concurrency: int
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What one set of services did in one turn."""

    tokens_per_s: float
    cpu_ms_per_token: float


def cpu_s(cluster: Cluster) -> float:
    """CPU seconds of a set of services since their start."""
    ticks = 0
    for name in cluster.names:
        stat = Path(f"/proc/{cluster.pid_of(name)}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        ticks += int(user) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")


async def drive(cluster: Cluster, client: AsyncClient, load: Load, first: int) -> Turn:
    """One turn. Prompts differ by `first`, so that no turn finds another's prefixes."""
    params = SamplingParams(temperature=0.0, max_tokens=load.max_tokens, ignore_eos=True)
    turn = asyncio.Semaphore(load.concurrency)
    num_tokens = 0

    async def one(index: int) -> None:
        nonlocal num_tokens
        prompt = [(first * 131 + index * 17 + i * 7) % 500 for i in range(load.prompt_tokens)]
        async with turn:
            done = await client.generate(prompt, params)
        num_tokens += len(done.token_ids)

    begin_s, begin_cpu_s = time.perf_counter(), cpu_s(cluster)
    await asyncio.gather(*(one(index) for index in range(load.num_requests)))
    elapsed_s, used_s = time.perf_counter() - begin_s, cpu_s(cluster) - begin_cpu_s
    return Turn(num_tokens / elapsed_s, used_s * 1e3 / num_tokens)


async def measure(options: ServeOptions, load: Load, num_rounds: int) -> list[tuple[Turn, Turn]]:
    """(off, on) of each round."""
    async with AsyncExitStack() as stack:
        sink, endpoint = await stack.enter_async_context(running_sink())
        off = await stack.enter_async_context(Cluster(options, on_line=_drop))
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        os.environ["OTEL_TRACES_SAMPLER"] = "always_on"
        traced = options.model_copy(update={"metrics_port": METRICS_PORT})
        on = await stack.enter_async_context(Cluster(traced, on_line=_drop))
        sets = [
            (cluster, await stack.enter_async_context(AsyncClient(cluster.address)))
            for cluster in (off, on)
        ]
        for cluster, client in sets:
            await drive(cluster, client, load, 0)
        rounds = []
        for number in range(1, num_rounds + 1):
            turns: dict[int, Turn] = {}
            for which in (0, 1) if number % 2 else (1, 0):
                turns[which] = await drive(*sets[which], load, number)
            rounds.append((turns[0], turns[1]))
            _tell(number, turns[0], turns[1])
        sys.stderr.write(f"exported {sink.num_bytes} bytes\n")
        if not sink.num_bytes:
            raise SystemExit("nothing was exported: this measured nothing")
        return rounds


def _tell(number: int, off: Turn, on: Turn) -> None:
    sys.stderr.write(
        f"round {number}: off {off.tokens_per_s:.0f}, on {on.tokens_per_s:.0f} tok/s; "
        f"CPU off {off.cpu_ms_per_token:.2f}, on {on.cpu_ms_per_token:.2f} ms a token\n"
    )


def _drop(name: str, line: str) -> None:
    """Logs of the services are of no interest here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="models/baton-py-6m")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--num-requests", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=32)
    given = parser.parse_args()
    options = ServeOptions(model=given.model, dtype="float32", port=0, log_level="warning")
    load = Load(given.num_requests, given.concurrency, given.prompt_tokens, given.max_tokens)
    rounds = asyncio.run(measure(options, load, given.rounds))
    speed = statistics.median(on.tokens_per_s / off.tokens_per_s for off, on in rounds)
    cpu = statistics.median(on.cpu_ms_per_token / off.cpu_ms_per_token for off, on in rounds)
    result = {
        "rounds": [{"off": asdict(off), "on": asdict(on)} for off, on in rounds],
        "throughput_ratio": speed,
        "throughput_cost_percent": 100 * (1 - speed),
        "cpu_ratio": cpu,
        "cpu_cost_percent": 100 * (cpu - 1),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
