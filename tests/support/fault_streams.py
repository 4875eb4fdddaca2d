"""Streams that live through a fault, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from baton.check.stream_history import StreamHistory
from baton.client import AsyncClient, Chunk
from baton.config import ServeOptions
from baton.errors import BatonError
from bench.fault_proxy import ProxiedCluster
from bench.oracle_requests import OracleRequest, draw_request
from engine.oracle import FULL_LAYERS, OracleLayers
from tests.support.live_tiers import BOX_MODEL

#: Opens a stream: what comes of a request.
Source = Callable[[OracleRequest], AsyncGenerator[Chunk]]


def by_grpc(client: AsyncClient) -> Source:
    """As the SDK reads it."""

    async def pieces(request: OracleRequest) -> AsyncGenerator[Chunk]:
        async with client.stream(request.prompt, request.params) as stream:
            async for chunk in stream:
                yield chunk

    return pieces


class Stream:
    """One stream, from its first moment to its end; it keeps what came. source: the pieces of a
    request's answer."""

    def __init__(self, source: Source, request: OracleRequest) -> None:
        self._source = source
        self._request = request
        self._history = StreamHistory(request)
        self._moved = asyncio.Condition()
        self.num_tokens = 0
        self.num_resumes = 0
        self.error: BatonError | None = None
        self.task = asyncio.create_task(self._run())

    async def tokens(self, number: int) -> None:
        """Returns when so many tokens have come, or the stream is over."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.num_tokens >= number or self.task.done())

    async def end(self) -> None:
        """Wait for its end, well or by an error, and check all that came."""
        await self.task
        assert not self._verdict(is_whole=self.error is None)

    async def cancel(self) -> None:
        """Give up, and check what came before."""
        self.task.cancel()
        await asyncio.wait({self.task})
        assert not self._verdict(is_whole=False)

    def _verdict(self, *, is_whole: bool) -> str:
        return self._history.verdict(self._request.right_output(), is_whole=is_whole)

    async def _run(self) -> None:
        try:
            async with aclosing(self._source(self._request)) as pieces:
                async for chunk in pieces:
                    self._history.take(chunk)
                    self.num_tokens += len(chunk.token_ids)
                    if chunk.timing:
                        self.num_resumes = chunk.timing.num_resumes
                    await self._notify()
        except BatonError as error:
            self.error = error
        await self._notify()

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()


class Streams:
    """Some at once."""

    def __init__(
        self,
        client: AsyncClient | Source,
        *,
        seed: int,
        num_streams: int = 6,
        num_tokens: int = 60,
        max_prompt_tokens: int = 200,
        layers: OracleLayers = FULL_LAYERS,
    ) -> None:
        """client: or what stands for it."""
        rng = random.Random(seed)
        source = by_grpc(client) if isinstance(client, AsyncClient) else client
        self.streams = [
            Stream(source, draw_request(rng, max_prompt_tokens, num_tokens, layers))
            for _ in range(num_streams)
        ]

    async def all_run(self) -> None:
        """Returns when each has a token."""
        for stream in self.streams:
            await stream.tokens(1)

    async def finish(self) -> list[BatonError]:
        """Wait for all, check each, and give the errors that ended some."""
        await asyncio.gather(*(stream.end() for stream in self.streams))
        return [stream.error for stream in self.streams if stream.error is not None]

    @property
    def num_resumes(self) -> int:
        return sum(stream.num_resumes for stream in self.streams)


async def until_quiet(client: AsyncClient, num_workers: int) -> None:
    """Every worker is ready again and holds nothing."""
    async with asyncio.timeout(60):
        while True:
            try:
                workers = (await client.model()).workers
            except BatonError:
                workers = ()  # the gateway itself is not back yet
            ready = [worker for worker in workers if worker.state == "ready"]
            if len(ready) == num_workers and not any(
                worker.num_leased_blocks or worker.num_in_flight for worker in ready
            ):
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def proxied_cluster(
    num_prefill: int = 2, num_decode: int = 2, **options: Any
) -> AsyncIterator[ProxiedCluster]:
    """Oracle engines with steps of 8 ms, and a proxy on every link. A killed process is always
    started again after the first delay."""
    defaults = {
        "model": str(BOX_MODEL),
        "engine": "oracle",
        "generation_config": "none",
        "oracle_step_ms": 8.0,
        "max_num_batched_tokens": 64,
        "num_prefill_workers": num_prefill,
        "num_decode_workers": num_decode,
        "prefill_block_size": 32,
        "decode_block_size": 8,
        "num_gpu_blocks_override": 2000,
        "kv_transport": "tcp",
        "port": 0,
        "drain_timeout_s": 2,
        "log_level": "error",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.supervisor.cluster._LAST_DELAY_S", 0.5)
        async with ProxiedCluster(ServeOptions(**{**defaults, **options})) as cluster:
            yield cluster
