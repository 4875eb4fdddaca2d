"""Metrics that several processes have: counters, which build a process runs, and how a worker
rounds."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from baton.types import PROTOCOL_VERSION, NumericsClass


class Counts:
    """A counter that is read when metrics are: to add is to add to an entry of a dict, where one of
    OpenTelemetry's takes some 7 us, seven times for each request. Written by one thread.

    label: the attribute that its values differ by; none if empty. known: values of the label that
    are reported as 0 before they first count; without a label its only value is.
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
        """of: the label's value."""
        self._counts[of] = self._counts.get(of, 0) + number

    def _observe(self, options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG002
        counts = list(self._counts.items())  # at once: another thread reads
        label = self._label
        return [Observation(number, {label: of} if label else {}) for of, number in counts]


def observe_build(meter: Meter, version: str) -> None:
    """Have the build observed: version, protocol and Python as attributes."""
    attributes = {
        "baton.version": version,
        "baton.protocol_version": str(PROTOCOL_VERSION),
        "python.version": platform.python_version(),
    }

    _observe(meter, "baton.build.info", "The build; always 1.", attributes)


def observe_numerics(meter: Meter, numerics: NumericsClass) -> None:
    """Have a worker's numerics class observed, and whether it runs on torch's operations for want
    of native CPU kernels."""
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
