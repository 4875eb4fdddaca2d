"""Announces this worker to the registry."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn

from baton.config import WorkerOptions
from baton.registry import Registration, Registry
from baton.telemetry.rate_limit import RateLimit
from baton.types import WorkerInfo, WorkerLoad

_log = logging.getLogger(__name__)

#: After an error that the registry did not foresee: when it is tried again, and how often it is
#: logged, in seconds.
_PAUSE_S, _LOG_S = 1.0, 60.0


async def keep_announcing(
    registry: Registry, current: Callable[[], Registration | None], *, pause_s: float = _PAUSE_S
) -> NoReturn:
    """Announce the worker until cancelled, whatever goes wrong: a worker that nobody finds is no
    reason to end it."""
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


def registration_of(
    options: WorkerOptions,
    info: WorkerInfo,
    transports: tuple[str, ...],
    port: int,
    load: Callable[[], WorkerLoad],
    is_alive: Callable[[], bool],
) -> Callable[[], Registration | None]:
    """What Registry.announce asks for: the worker as it is at that moment; None while its engine
    loop stands still."""
    address = f"{options.advertised_host}:{port}"

    def current() -> Registration | None:
        return Registration(address, info, transports, load()) if is_alive() else None

    return current
