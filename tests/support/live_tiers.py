"""Real services in this process: real gRPC, real sockets, oracle engines, the tokenizer of the
model in the box."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.client import AsyncClient, Completion
from baton.config import DecodeOptions, GatewayOptions, PrefillOptions
from baton.service import ReadyReport
from decode_svc.server import serve_decode
from gateway.server import serve_gateway
from prefill_svc.server import serve_prefill

_Serve = Callable[[Any, asyncio.Event, Callable[[ReadyReport], None]], Awaitable[None]]


@asynccontextmanager
async def serving(serve: _Serve, options: object) -> AsyncIterator[str]:
    """Run a service; yields its address, and stops it in order at the end."""
    async with reporting(serve, options) as report:
        yield report.address


@asynccontextmanager
async def reporting(serve: _Serve, options: object) -> AsyncIterator[ReadyReport]:
    """As `serving`, with all that it reports."""
    stop = asyncio.Event()
    ready: asyncio.Future[ReadyReport] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(serve(options, stop, ready.set_result))
    try:
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield ready.result()
    finally:
        stop.set()
        await task


#: Options of tiers that share one interpreter. On a busy machine a tier may not run for seconds,
#: and must not be given up for it.
_COMMON = {"drain_timeout_s": 1.0, "worker_stall_timeout_s": 15.0}


def decode_worker(**options: Any) -> Any:
    """A decode worker on an oracle engine; drains for 1 s at most."""
    defaults = {**_COMMON, "model": "oracle", "engine": "oracle", "block_size": 4}
    return serving(serve_decode, DecodeOptions(**{**defaults, **options}))


def prefill_worker(**options: Any) -> Any:
    """A prefill worker on an oracle engine; drains for 1 s at most."""
    defaults = {**_COMMON, "model": "oracle", "engine": "oracle", "block_size": 8}
    return serving(serve_prefill, PrefillOptions(**{**defaults, **options}))


BOX_MODEL = Path(__file__).parents[2] / "models" / "baton-py-6m"


def gateway(prefills: list[str], decodes: list[str], **options: Any) -> Any:
    """A gateway before the workers at these addresses; yields its address."""
    return serving(serve_gateway, options_of_gateway(prefills, decodes, **options))


def options_of_gateway(prefills: list[str], decodes: list[str], **options: Any) -> GatewayOptions:
    """Options of a gateway before the workers at these addresses."""
    defaults = {**_COMMON, "model": str(BOX_MODEL), "served_model_name": "oracle", "port": 0}
    # What a test does not say is the oracle's default, not the model's own.
    defaults["generation_config"] = "none"
    workers = {"prefill_workers": tuple(prefills), "decode_workers": tuple(decodes)}
    return GatewayOptions(**{**defaults, **workers, **options})


#: For decode workers that compute no prompt. Others compute one that takes them less time than its
#: KV would.
ONLY_DECODES = {"max_local_prefill_tokens": 0}


def has_crossed(done: Completion) -> bool:
    """Whether its KV came from a prefill worker. The tokens do not tell: a decode worker computes
    what does not come."""
    return bool(done.timing.prefill_worker) and done.timing.transfer_bytes > 0


@dataclass(frozen=True)
class LiveSystem:
    """Addresses of everything, and a client. http: of the gateway's, too."""

    gateway: str
    prefills: list[str]
    decodes: list[str]
    client: AsyncClient
    http: str

    async def until_quiet(self) -> None:
        """Return when no worker holds a block and the gateway has nothing in flight."""
        async with asyncio.timeout(60):
            while True:
                model = await self.client.model()
                if not any(
                    w.num_leased_blocks or w.num_in_flight or w.num_running for w in model.workers
                ):
                    return
                # The gateway hears of a change with the next load report.
                await asyncio.sleep(0.02)


@asynccontextmanager
async def live_system(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    worker_options: dict[str, Any] | None = None,
    decode_options: dict[str, Any] | None = None,
    gateway_options: dict[str, Any] | None = None,
    api_key: str | None = None,
) -> AsyncIterator[LiveSystem]:
    """Workers, a gateway and a client, which shows `api_key`, stopped in order at the end."""
    common = worker_options or {}
    async with AsyncExitStack() as stack:
        prefills = [
            await stack.enter_async_context(prefill_worker(worker_id=f"p{i}", **common))
            for i in range(num_prefill)
        ]
        decodes = [
            await stack.enter_async_context(
                decode_worker(worker_id=f"d{i}", **{**common, **(decode_options or {})})
            )
            for i in range(num_decode)
        ]
        options = options_of_gateway(prefills, decodes, **(gateway_options or {}))
        report = await stack.enter_async_context(reporting(serve_gateway, options))
        client = await stack.enter_async_context(
            AsyncClient(report.address, api_key=api_key, max_retries=0)
        )
        yield LiveSystem(report.address, prefills, decodes, client, report.http_address)
