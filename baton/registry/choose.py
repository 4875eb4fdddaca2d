"""Which registry an option names."""

from __future__ import annotations

from baton.errors import ConfigError
from baton.registry.interface import Registry, StaticRegistry


def make_registry(url: str | None, model: str = "") -> Registry:
    """The registry at `url`; without one, the embedded one, with nobody on its list.

    model: for gateways, the name of the model whose workers they look for. Raises ConfigError.
    """
    if url is None:
        return StaticRegistry()
    try:
        # Only a process that uses Redis needs its client.
        from baton.registry.redis import RedisRegistry
    except ImportError as error:
        fix = "install the redis package (pip install redis), or leave the option out"
        raise ConfigError.of("--registry", "redis", fix) from error
    return RedisRegistry(url, model)
