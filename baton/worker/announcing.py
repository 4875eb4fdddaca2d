"""Telling the registry about this worker."""

from __future__ import annotations

from collections.abc import Callable

from baton.config import WorkerOptions
from baton.registry import Registration
from baton.types import WorkerInfo, WorkerLoad

#: What KV may travel by, unless one way is pinned.
TRANSPORTS = ("shm", "tcp")


def registration_of(
    options: WorkerOptions,
    info: WorkerInfo,
    port: int,
    load: Callable[[], WorkerLoad],
    is_alive: Callable[[], bool],
) -> Callable[[], Registration | None]:
    """What Registry.announce asks for: the worker as it is at that moment; None while its engine loop stands still."""
    address = f"{options.advertised_host}:{port}"
    pinned = options.kv_transport
    transports = TRANSPORTS if pinned == "auto" else (pinned,)

    def current() -> Registration | None:
        return Registration(address, info, transports, load()) if is_alive() else None

    return current
