"""Share of an engine's speed that reaches clients: steps of a fixed length, with the whole service
around them.

As a program: a decode worker on an engine that computes nothing for --oracle-step-ms per step;
replaces decode_svc and has its options.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from statistics import fmean

from baton.client import AsyncClient, SamplingParams
from baton.config import DecodeOptions, ServeOptions
from baton.service import OnReady, main
from baton.supervisor import Cluster
from baton.supervisor.plan import PROGRAMS, Programs
from bench.host_rig import HostRig
from bench.stub_engine import BLOCK_SIZE, StubEngine
from decode_svc.server import serve_decode

WORKER = (sys.executable, "-m", "bench.host_service")

_NUM_BLOCKS = 1 << 16
_PROMPT = (17, 18, 19, 20)


@dataclass(frozen=True, slots=True)
class ServiceShare:
    """Mean milliseconds. engine_ms: a step of the engine. core_ms: a step of the decode core alone
    in its process. client_ms: between tokens of a stream. core_ms is measured half before and half
    after client_ms."""

    num_streams: int
    engine_ms: float
    core_ms: float
    client_ms: float

    @property
    def share(self) -> float:
        """Share of the core's token rate that reaches clients."""
        return self.core_ms / self.client_ms


async def measure_service(
    model: str, num_streams: int, num_tokens: int, engine_ms: float
) -> ServiceShare:
    """One decode worker on an engine that takes time but no CPU, behind a gateway."""
    before_ms = _core_ms(num_streams, num_tokens // 2, engine_ms)
    options = ServeOptions.model_validate(
        {
            "model": model,
            "engine": "oracle",
            "oracle_step_ms": engine_ms,
            "speculative_method": "none",
            "max_num_seqs": num_streams,
            "colocated": True,
            "num_decode_workers": 1,
            "swap_space": 0,
            "log_level": "error",
            "port": 0,
        }
    )
    programs = Programs(PROGRAMS.prefill, WORKER, PROGRAMS.gateway)
    async with (
        Cluster(options, programs=programs) as cluster,
        AsyncClient(cluster.address, max_retries=0) as client,
    ):
        streams = [_stream_ms(client, num_tokens) for _ in range(num_streams)]
        client_ms = fmean(await asyncio.gather(*streams))
    after_ms = _core_ms(num_streams, num_tokens // 2, engine_ms)
    return ServiceShare(num_streams, engine_ms, fmean((before_ms, after_ms)), client_ms)


def _core_ms(num_streams: int, num_steps: int, engine_ms: float) -> float:
    """Milliseconds of a step of all streams."""
    num_blocks = -(-(len(_PROMPT) + num_steps + 3) // BLOCK_SIZE)
    rig = HostRig(num_streams, len(_PROMPT), num_streams * num_blocks, engine_ms / 1e3, 2)
    rig.step(rig.opening)
    begin_s = time.perf_counter()
    for _ in range(num_steps):
        rig.step()
    return (time.perf_counter() - begin_s) / num_steps * 1e3


async def _stream_ms(client: AsyncClient, num_tokens: int) -> float:
    """Milliseconds per token of one stream after its first chunk."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    first_s = last_s = 0.0
    num_first = 0
    async with client.stream(_PROMPT, params) as stream:
        async for chunk in stream:
            last_s = time.monotonic()
            if not num_first:
                first_s, num_first = last_s, len(chunk.token_ids)
    return (last_s - first_s) / (num_tokens - num_first) * 1e3


async def serve_stub(options: DecodeOptions, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Serve a decode worker without a model."""
    step_s = options.oracle_step_ms / 1e3
    await serve_decode(options, stop, on_ready, lambda _: StubEngine(_NUM_BLOCKS, step_s))


if __name__ == "__main__":
    main(DecodeOptions, serve_stub, "decode")
