"""Drains a decode worker in mid-stream: its live sequences move to another one with their KV.

    python -m bench.drain [--num-streams 200] [--engine oracle|torch] [--model DIR] [--json FILE]

Two decode workers, one prefill worker. The same requests run twice: undisturbed, and with the
busier decode worker terminated (SIGTERM, as any orchestrator does) once every stream has a
token. Shown are: streams that finished with the undisturbed run's tokens, those that had to be
computed anew, and the longest silence between two tokens of a stream in each run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from baton.client import AsyncClient, SamplingParams
from baton.config import ServeOptions
from baton.supervisor import Cluster
from bench.machine import describe_commit, describe_machine, describe_versions


@dataclass(frozen=True, slots=True)
class DrainRequest:
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One stream. longest_gap_s: between two of its pieces."""

    token_ids: tuple[int, ...]
    longest_gap_s: float
    num_resumes: int


@dataclass(frozen=True, slots=True)
class DrainResult:
    """num_moved_at: streams that were live on the worker when it began to drain. Gaps in
    seconds."""

    num_streams: int
    num_moved_at: int
    num_equal: int
    num_resumed: int
    longest_gap_s: float
    longest_undisturbed_gap_s: float


def draw_requests(num_streams: int, vocab_size: int, num_tokens: int) -> list[DrainRequest]:
    rng = random.Random(7)
    return [
        DrainRequest(
            tuple(rng.randrange(vocab_size) for _ in range(rng.randint(10, 120))),
            SamplingParams(
                temperature=rng.choice([0.0, 0.8]),
                seed=rng.getrandbits(63),
                presence_penalty=rng.choice([0.0, 0.4]),
                max_tokens=num_tokens,
                ignore_eos=True,
            ),
        )
        for _ in range(num_streams)
    ]


class Run:
    """All requests at once."""

    def __init__(self, client: AsyncClient, requests: Sequence[DrainRequest]) -> None:
        self._client = client
        self._num_silent = len(requests)
        self.all_speak = asyncio.Event()
        """Set when every stream has had a token."""
        self._tasks = [asyncio.create_task(self._stream(request)) for request in requests]

    async def finish(self) -> list[StreamResult]:
        return list(await asyncio.gather(*self._tasks))

    async def _stream(self, request: DrainRequest) -> StreamResult:
        token_ids: list[int] = []
        longest_gap_s, last_s, num_resumes = 0.0, 0.0, 0
        async with self._client.stream(request.prompt, request.params) as stream:
            async for chunk in stream:
                now_s = time.monotonic()
                if token_ids:
                    longest_gap_s = max(longest_gap_s, now_s - last_s)
                else:
                    self._num_silent -= 1
                    if not self._num_silent:
                        self.all_speak.set()
                last_s = now_s
                token_ids += chunk.token_ids
                if chunk.timing:
                    num_resumes = chunk.timing.num_resumes
        return StreamResult(tuple(token_ids), longest_gap_s, num_resumes)


async def drain(options: ServeOptions, num_streams: int, num_tokens: int) -> DrainResult:
    """Run undisturbed, then with the busier decode worker drained."""
    async with Cluster(options) as cluster, AsyncClient(cluster.address, max_retries=0) as client:
        vocab_size = (await client.model()).vocab_size
        requests = draw_requests(num_streams, vocab_size, num_tokens)
        undisturbed = await Run(client, requests).finish()
        run = Run(client, requests)
        await run.all_speak.wait()
        workers = {w.address: w for w in (await client.model()).workers}
        decodes = [n for n in cluster.names if n.startswith("decode")]
        busiest = max(decodes, key=lambda n: workers[cluster.address_of(n)].num_running)
        num_moved_at = workers[cluster.address_of(busiest)].num_running
        os.kill(cluster.pid_of(busiest), signal.SIGTERM)
        drained = await run.finish()
    return DrainResult(
        num_streams=num_streams,
        num_moved_at=num_moved_at,
        num_equal=sum(
            a.token_ids == b.token_ids for a, b in zip(undisturbed, drained, strict=True)
        ),
        num_resumed=sum(one.num_resumes > 0 for one in drained),
        longest_gap_s=max(one.longest_gap_s for one in drained),
        longest_undisturbed_gap_s=max(one.longest_gap_s for one in undisturbed),
    )


def options_of(engine: str, model: str) -> ServeOptions:
    return ServeOptions.model_validate(
        {
            "model": model,
            "engine": engine,
            "generation_config": "none",
            "dtype": "float32",
            "oracle_step_ms": 20.0,
            "num_decode_workers": 2,
            "max_num_seqs": 256,
            "num_gpu_blocks_override": 4000,
            "drain_timeout_s": 60,
            "port": 0,
            "log_level": "error",
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--num-streams", type=int, default=200)
    parser.add_argument("--num-tokens", type=int, default=150)
    parser.add_argument("--engine", choices=("oracle", "torch"), default="oracle")
    parser.add_argument("--model", default="models/baton-py-6m")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = options_of(arguments.engine, arguments.model)
    result = asyncio.run(drain(options, arguments.num_streams, arguments.num_tokens))
    Console().print(
        f"{result.num_equal} of {result.num_streams} streams have the undisturbed run's tokens; "
        f"{result.num_moved_at} were on the worker that drained, {result.num_resumed} were "
        f"computed anew; longest gap {result.longest_gap_s * 1e3:.0f} ms, undisturbed "
        f"{result.longest_undisturbed_gap_s * 1e3:.0f} ms"
    )
    if arguments.json:
        document = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "commit": describe_commit(),
            "engine": arguments.engine,
            "result": asdict(result),
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if result.num_equal == result.num_streams else 1


if __name__ == "__main__":
    sys.exit(main())
