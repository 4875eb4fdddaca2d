"""What a process reports of its start: the phase it is in. In its log, and on the pipe of its
supervisor.

A start has many places that know something, deep below the service, and no object that all of them
share but the log. So these are records of one logger, whose handler writes them to the pipe where
there is one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

_log = logging.getLogger("baton.start")

#: Attribute of a record with what the supervisor gets: {"phase": ...}.
_ATTRIBUTE = "start"


def report_phase(phase: str) -> None:
    """The start has come to a new phase, such as "loading weights"."""
    _log.info("%s", phase, extra={_ATTRIBUTE: {"phase": phase}})


class StartLogHandler(logging.Handler):
    """Passes on what is reported to the supervisor, whatever level the process logs."""

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
