"""Telemetry of a process: OpenTelemetry and Prometheus. Never contains prompt or answer text."""

from baton.telemetry.names import Phase, RequestEvent
from baton.telemetry.telemetry import (
    Telemetry,
    TelemetrySettings,
    no_telemetry,
    open_telemetry,
    running_telemetry,
)

__all__ = [
    "Phase",
    "RequestEvent",
    "Telemetry",
    "TelemetrySettings",
    "no_telemetry",
    "open_telemetry",
    "running_telemetry",
]
