"""Where workers tell that they are there, and gateways learn which are: hints, never the only
truth."""

from baton.registry.interface import Registry, WorkerAdded, WorkerRemoved
from baton.registry.make import make_registry
from baton.registry.pipe import PipeRegistry
from baton.registry.registration import Registration
from baton.registry.static import StaticRegistry

__all__ = [
    "PipeRegistry",
    "WorkerAdded",
    "WorkerRemoved",
    "Registration",
    "Registry",
    "StaticRegistry",
    "make_registry",
]
