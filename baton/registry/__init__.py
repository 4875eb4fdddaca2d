"""Where workers tell that they are there, and gateways learn which are: hints, never the only truth."""

from baton.registry.interface import Joined, Left, Registry
from baton.registry.make import make_registry
from baton.registry.pipe import PipeRegistry
from baton.registry.registration import Registration
from baton.registry.static import StaticRegistry

__all__ = [
    "Joined",
    "Left",
    "PipeRegistry",
    "Registration",
    "Registry",
    "StaticRegistry",
    "make_registry",
]
