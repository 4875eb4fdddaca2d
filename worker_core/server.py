"""A worker from start to end: the engine loop, the gRPC server, health, the registry, the drain."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from baton import __version__
from baton.config import WorkerOptions
from baton.errors import EngineFault
from baton.registry import Registration, Registry, make_registry
from baton.rpc.peer_names import PeerNamesInterceptor
from baton.rpc.server import Register, start_server
from baton.rpc.tls import server_credentials
from baton.service import ReadyReport
from baton.start_log import PhaseClock
from baton.telemetry.rate_limit import RateLimit
from baton.types import WorkerIdentity, WorkerInfo
from engine.interface import EngineSpec
from worker_core.commands import Command, Drain, StreamEvent
from worker_core.loop import EngineLoop, LoadBoard, is_empty

_log = logging.getLogger(__name__)

#: After an error that the registry did not foresee: when it is tried again, and how often it is
#: logged, in seconds.
_PAUSE_S, _LOG_S = 1.0, 60.0


def new_identity(options: WorkerOptions) -> WorkerIdentity:
    """The worker's name with a generation that no other boot of it has."""
    return WorkerIdentity(options.worker_name, secrets.randbits(63))


def describe(
    options: WorkerOptions, identity: WorkerIdentity, spec: EngineSpec, max_local_prefill: int = 0
) -> WorkerInfo:
    """What the worker reports of itself to gateways."""
    return WorkerInfo(
        identity=identity,
        tier=options.tier,
        model=spec.model,
        layout=spec.layout,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        num_blocks=spec.num_blocks,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_local_prefill_tokens=max_local_prefill,
        numerics=spec.numerics,
        software_version=__version__,
        metrics_port=options.metrics_port,
        adapters=spec.adapters,
    )


class WorkerServer:
    """Runs a worker from its first request to its last."""

    def __init__(
        self,
        options: WorkerOptions,
        loop: EngineLoop[Command, StreamEvent],
        board: LoadBoard,
        info: WorkerInfo,
        dtype_reason: str,
        transports: tuple[str, ...],
    ) -> None:
        """transports: those that KV may come to this worker by."""
        self._options = options
        self._dtype_reason = dtype_reason
        self._info = info
        self._transports = transports
        self._registry = make_registry(options.registry)
        self._loop = loop
        self._board = board

    async def serve(
        self,
        register: Register,
        stop: asyncio.Event,
        on_ready: Callable[[ReadyReport], None],
        clock: PhaseClock,
    ) -> None:
        """Serve until `stop`, then let running sequences end, for at most drain_timeout_s.

        Raises EngineFault if the engine loop ends by itself.
        """
        self._loop.start()
        tls, peer_names = self._options.tls, self._options.ssl_peer_names
        server = await start_server(
            f"{self._options.host}:{self._options.port}",
            register,
            # Only gateways and operators have business here: with TLS, all callers show a
            # certificate.
            credentials=server_credentials(tls, requires_client_cert=True) if tls else None,
            # Half for the silence, half for the answer: a gateway that nothing comes from any more
            # is lost as soon.
            keepalive_ms=round(self._options.worker_stall_timeout_s * 500),
            interceptors=[PeerNamesInterceptor(peer_names)] if peer_names else [],
        )
        clock.lap("listen")
        numerics = self._info.numerics
        on_ready(ReadyReport(server.address, clock.phases, numerics, self._dtype_reason))
        health = asyncio.create_task(server.drive_health(self._loop.is_alive))
        announcing = asyncio.create_task(self._announce(server.port))
        waits = {asyncio.create_task(stop.wait()), asyncio.create_task(self._loop.ended.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._loop.ended.is_set():
                raise EngineFault("the engine loop ended; its error is in the log above")
            await self._drain_all()
        finally:
            for task in (announcing, health, *waits):
                task.cancel()
            await asyncio.gather(announcing, health, *waits, return_exceptions=True)
            await server.stop(grace_s=1.0)
            await self._loop.stop()

    async def _announce(self, port: int) -> None:
        """Be found by gateways, but not while the engine loop stands still."""
        address = f"{self._options.advertised_host}:{port}"

        def current() -> Registration | None:
            if not self._loop.is_alive():
                return None
            return Registration(address, self._info, self._transports, self._board.load)

        await keep_announcing(self._registry, current)

    async def _drain_all(self) -> None:
        self._loop.submit(Drain())
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.drain_timeout_s):
                await self._board.wait_until(lambda load: load.is_draining and is_empty(load))


async def keep_announcing(
    registry: Registry, current: Callable[[], Registration | None], *, pause_s: float = _PAUSE_S
) -> NoReturn:
    """Announce the worker until cancelled. Errors are logged: a worker that is not found keeps
    serving."""
    warnings = RateLimit(_LOG_S, time.monotonic)
    while True:
        announcing = asyncio.create_task(registry.announce(current))
        try:
            await asyncio.wait({announcing})
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
        error = None if announcing.cancelled() else announcing.exception()
        if warnings.take():
            _log.error(
                "this worker could not be announced to the registry; trying again", exc_info=error
            )
        await asyncio.sleep(pause_s)
