"""Phases of a process's start, reported in its log and on the pipe of its supervisor.

Phases are reported deep below the service, where the log is the only shared object. They are
records of one logger; its handler writes them to the pipe, if there is one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

_log = logging.getLogger("baton.start")

#: Attribute of a record with the report for the supervisor: {"phase": ...}.
_ATTRIBUTE = "start"


def report_phase(phase: str) -> None:
    """Report a new phase, such as "loading weights"."""
    _log.info("%s", phase, extra={_ATTRIBUTE: {"phase": phase}})


class StartLogHandler(logging.Handler):
    """Passes reported phases to the supervisor at any log level."""

    def __init__(self, write: Callable[[Mapping[str, object]], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(getattr(record, _ATTRIBUTE))

    def attach(self) -> None:
        """From now on. The process's own log has none of it then: the supervisor shows it."""
        _log.setLevel(logging.INFO)
        _log.propagate = False
        _log.addHandler(self)

    def detach(self) -> None:
        """As it was before."""
        _log.removeHandler(self)
        _log.setLevel(logging.NOTSET)
        _log.propagate = True
