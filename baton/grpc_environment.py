"""What gRPC reads from the environment when it is imported, as our processes need it. Imports
nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

#: The children that a process of ours starts are executed at once: gRPC has nothing to repair in
#: them, and would complain that it cannot. What goes wrong is in our own errors, not by lines
#: of the C core.
GRPC_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"}
)


def quiet_grpc() -> None:
    """Give gRPC this environment, but for what the user has set. Before its first channel."""
    for name, value in GRPC_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
