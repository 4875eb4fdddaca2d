"""What is left of an engine's speed at the clients: steps of a set length, with all of the service around them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from statistics import fmean, median

from baton.client import AsyncClient, SamplingParams
from baton.config import DecodeOptions, ServeOptions
from baton.supervisor import Cluster
from baton.types import Sampling, SequenceSpec
from bench.decode_rig import DecodeRig

_PROMPT = (17, 18, 19, 20)


@dataclass(frozen=True, slots=True)
class ServiceShare:
    """Milliseconds. core_ms: a step of the decode core around the engine, alone. client_ms: between the tokens of a stream."""

    num_streams: int
    engine_ms: float
    core_ms: float
    client_ms: float

    @property
    def share(self) -> float:
        """Of the core's tokens a second, those that reach clients."""
        return self.core_ms / self.client_ms


async def measure_service(
    model: str, num_streams: int, num_tokens: int, engine_ms: float
) -> ServiceShare:
    """One decode worker that computes prompts itself, and a gateway before it."""
    settings: dict[str, object] = {
        "model": model,
        "engine": "oracle",
        "oracle_step_ms": engine_ms,
        "speculative_method": "none",
        "max_num_seqs": num_streams,
        "colocated": True,
        "log_level": "error",
        "port": 0,
    }
    core_ms = _core_ms(DecodeOptions.model_validate(settings), num_streams, num_tokens)
    options = ServeOptions.model_validate({**settings, "num_decode_workers": 1})
    async with Cluster(options) as cluster, AsyncClient(cluster.address) as client:
        streams = [_stream_ms(client, num_tokens) for _ in range(num_streams)]
        client_ms = fmean(await asyncio.gather(*streams))
    return ServiceShare(num_streams, engine_ms, core_ms, client_ms)


def _core_ms(options: DecodeOptions, num_streams: int, num_tokens: int) -> float:
    rig = DecodeRig(options, time.monotonic)
    for index in range(num_streams):
        rig.open(SequenceSpec(f"r{index}", _PROMPT, Sampling(max_tokens=num_tokens)))
    rig.step()
    return median(rig.step().seconds for _ in range(num_tokens - 2)) * 1e3


async def _stream_ms(client: AsyncClient, num_tokens: int) -> float:
    """Time per token of one stream after its first piece."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    first_s = last_s = 0.0
    num_first = 0
    async with client.stream(_PROMPT, params) as stream:
        async for chunk in stream:
            last_s = time.monotonic()
            if not num_first:
                first_s, num_first = last_s, len(chunk.token_ids)
    return (last_s - first_s) / (num_tokens - num_first) * 1e3
