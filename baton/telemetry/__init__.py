"""What a process reports of itself to OpenTelemetry and Prometheus. Never prompt or answer
text."""

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
