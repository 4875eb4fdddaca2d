"""Options of every command: what they are (options), how they are read (load), and what their defaults need."""

from baton.config.load import load_options
from baton.config.options import (
    DecodeOptions,
    EngineOptions,
    GatewayOptions,
    LogLevel,
    Options,
    PrefillOptions,
    ServeOptions,
    ServiceOptions,
    WorkerOptions,
)

__all__ = [
    "DecodeOptions",
    "EngineOptions",
    "GatewayOptions",
    "LogLevel",
    "Options",
    "PrefillOptions",
    "ServeOptions",
    "ServiceOptions",
    "WorkerOptions",
    "load_options",
]
