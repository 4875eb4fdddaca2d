"""Options of every command: definitions (*options, fields), loading (load) and derived defaults."""

from baton.config.decode_options import DecodeOptions
from baton.config.engine_options import EngineOptions
from baton.config.fields import LogLevel
from baton.config.gateway_options import GatewayOptions
from baton.config.load import load_options
from baton.config.options import Options, ServiceOptions
from baton.config.serve_options import ServeOptions
from baton.config.worker_options import PrefillOptions, WorkerOptions

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
