"""Which build a process runs, as a metric that is always 1."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from baton.types import PROTOCOL_VERSION


def observe_build(meter: Meter, version: str) -> None:
    """Have the build observed: version, protocol and Python as attributes."""
    attributes = {
        "baton.version": version,
        "baton.protocol_version": str(PROTOCOL_VERSION),
        "python.version": platform.python_version(),
    }

    def build(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
        return [Observation(1, attributes)]

    meter.create_observable_gauge("baton.build.info", [build], description="The build; always 1.")
