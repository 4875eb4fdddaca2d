"""Where workers announce themselves, and gateways learn which there are: hints, never the only
truth."""

from baton.registry.choose import make_registry
from baton.registry.interface import (
    Registry,
    StaticRegistry,
    WorkerAdded,
    WorkerRemoved,
)
from baton.registry.pipe import PipeRegistry
from baton.registry.registration import Registration

__all__ = [
    "PipeRegistry",
    "WorkerAdded",
    "WorkerRemoved",
    "Registration",
    "Registry",
    "StaticRegistry",
    "make_registry",
]
