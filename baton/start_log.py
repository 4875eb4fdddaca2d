"""Phases of a process's start: measured, and reported in its log and on its supervisor's pipe.

Phases are reported deep below the service, where the log is the only shared object. They are
records of one logger; its handler writes them to the pipe, if there is one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

_log = logging.getLogger("baton.start")

#: Attribute of a record with the report for the supervisor: {"phase": ...}.
_ATTRIBUTE = "start"


def report_phase(phase: str) -> None:
    """Report a new phase, such as "loading weights"."""
    _log.info("%s", phase, extra={_ATTRIBUTE: {"phase": phase}})


class PhaseClock:
    """`phases`: seconds of each, in order."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last_s = time.monotonic()

    def lap(self, phase: str) -> None:
        """A phase has ended, and the next one begins."""
        now_s = time.monotonic()
        self.phases[phase] = now_s - self._last_s
        self._last_s = now_s


class StartLogHandler(logging.Handler):
    """Passes reported phases to the supervisor at any log level."""

    def __init__(self, write: Callable[[Mapping[str, object]], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(getattr(record, _ATTRIBUTE))

    def attach(self) -> None:
        """Begin. The process's own log omits the phases, because the supervisor shows them."""
        _log.setLevel(logging.INFO)
        _log.propagate = False
        _log.addHandler(self)

    def detach(self) -> None:
        """End, and restore the log."""
        _log.removeHandler(self)
        _log.setLevel(logging.NOTSET)
        _log.propagate = True
