"""Histograms of times, in seconds."""

from __future__ import annotations

from typing import Final

from opentelemetry.metrics import Histogram, Meter

#: Boundaries for what a worker does with one sequence's KV or prompt.
SEQUENCE_BOUNDS_S: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


def seconds_histogram(
    meter: Meter, name: str, description: str, bounds: tuple[float, ...] = SEQUENCE_BOUNDS_S
) -> Histogram:
    """bounds: advised, in seconds."""
    return meter.create_histogram(
        name, unit="s", description=description, explicit_bucket_boundaries_advisory=bounds
    )
