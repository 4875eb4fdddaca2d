"""Metrics common to several processes: counters, build information, and a worker's numerics
class."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from baton.types import PROTOCOL_VERSION, NumericsClass


class Counts:
    """A counter collected on demand, written by one thread. Adding updates a dict entry;
    OpenTelemetry's counter takes some 7 us, seven times per request.

    label: attribute that separates its values; empty for none.
    known: label values reported as 0 before their first count; without a label, its only value is.
    """

    def __init__(
        self,
        meter: Meter,
        name: str,
        description: str,
        label: str = "",
        *known: str,
        unit: str = "",
    ) -> None:
        self._label = label
        self._counts: dict[str, int] = dict.fromkeys(known if label else ("",), 0)
        meter.create_observable_counter(name, [self._observe], unit, description)

    def add(self, number: int, of: str = "") -> None:
        """Add to the count. of: the label's value."""
        self._counts[of] = self._counts.get(of, 0) + number

    def _observe(self, options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG002
        counts = list(self._counts.items())  # a copy, because another thread reads it
        label = self._label
        return [Observation(number, {label: of} if label else {}) for of, number in counts]


def observe_build(meter: Meter, version: str) -> None:
    """Register a gauge with the build's version, protocol and Python as attributes."""
    attributes = {
        "baton.version": version,
        "baton.protocol_version": str(PROTOCOL_VERSION),
        "python.version": platform.python_version(),
    }

    _observe(meter, "baton.build.info", "The build; always 1.", attributes)


def observe_numerics(meter: Meter, numerics: NumericsClass) -> None:
    """Register gauges of a worker's numerics class, and of the fallback to torch operations without
    native CPU kernels."""
    attributes = {
        "baton.numerics.device": numerics.device,
        "baton.numerics.level": numerics.level,
        "baton.numerics.dtype": numerics.dtype,
        "baton.numerics.kernels": numerics.kernels,
    }
    _observe(meter, "baton.numerics.info", "The numerics class; always 1.", attributes)
    text = "1 if there are no native CPU kernels and torch's operations run, else 0."
    _observe(meter, "baton.kernels.fallback", text, {}, int(numerics.is_fallback))


def _observe(
    meter: Meter, name: str, text: str, attributes: Mapping[str, str], value: int = 1
) -> None:
    def constant(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
        return [Observation(value, attributes)]

    meter.create_observable_gauge(name, [constant], description=text)
