"""Logging of a process: lines for people on a terminal, JSON lines elsewhere; both name the request
they are about.

Formatted here and not by python-json-logger: it writes whatever `extra` holds, and spells levels in
capitals; to change both takes as many lines.

A message belongs to a request when it is logged with `extra={"request_id": ...}`, and to a trace
with "trace_id" there.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import IO

from baton.config import LogLevel

#: What a record may say about where it belongs, in the order of the lines.
_IDS = ("request_id", "trace_id")

_PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure_logging(level: LogLevel, process: str, stream: IO[str] | None = None) -> None:
    """Send the root logger's messages from `level` on to `stream` (stderr), in place of what it had
    before.

    process: name of this process, told with each line.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter() if stream.isatty() else JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class PlainFormatter(logging.Formatter):
    """Time, level, logger and message, then the ids of request and trace if there are any."""

    def __init__(self) -> None:
        super().__init__(_PLAIN, datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        text = super().formatMessage(record)
        ids = " ".join(_ids_of(record).values())
        return f"{text} [{ids}]" if ids else text


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time (UTC, ISO 8601), level, process, logger, message,
    request_id, trace_id, exception. The last three only where they are known.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= _ids_of(record)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True)


def _ids_of(record: logging.LogRecord) -> dict[str, str]:
    """The ids that the record has."""
    return {name: str(value) for name in _IDS if (value := getattr(record, name, ""))}
