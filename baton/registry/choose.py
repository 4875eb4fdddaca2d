"""Selects the registry of an option value."""

from __future__ import annotations

from baton.errors import ConfigError
from baton.registry.board import Board
from baton.registry.interface import Registry, StaticRegistry
from baton.registry.lease import Lease, SoleLease


def make_lease(url: str | None, model: str) -> Lease:
    """The lease of a model's planner in the registry at `url`; without a URL, that of a gateway
    that is alone. Raises ConfigError."""
    if url is None:
        return SoleLease()
    try:
        from baton.registry.redis_lease import RedisLease
    except ImportError as error:
        raise _no_client() from error
    return RedisLease(url, model)


def make_board(url: str | None, model: str) -> Board | None:
    """The board of a model's gateways in the registry at `url`; None for a gateway that is alone.
    Raises ConfigError."""
    if url is None:
        return None
    from baton.registry.redis_board import RedisBoard

    return RedisBoard(url, model)


def make_registry(url: str | None, model: str = "") -> Registry:
    """The registry at `url`; without a URL, the embedded one with an empty list.

    model: for gateways, the model to find workers of. Raises ConfigError.
    """
    if url is None:
        return StaticRegistry()
    try:
        # Imported on demand: the client of Redis.
        from baton.registry.redis import RedisRegistry
    except ImportError as error:
        raise _no_client() from error
    return RedisRegistry(url, model)


def _no_client() -> ConfigError:
    fix = "install the redis package (pip install redis), or leave the option out"
    return ConfigError.of("--registry", "redis", fix)
