"""Worker registries: workers announce their addresses, gateways discover them. Entries are hints
only."""

from baton.registry.choose import make_board, make_lease, make_registry
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
    "make_board",
    "make_lease",
    "make_registry",
]
