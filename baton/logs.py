"""Logging of a process: lines for people on a terminal, JSON lines elsewhere; both name the request they are about.

A message belongs to a request when it is logged with `extra={"request_id": ...}`.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import IO

from baton.config.options import LogLevel

_PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure_logging(level: LogLevel, process: str, stream: IO[str] | None = None) -> None:
    """Send the root logger's messages from `level` on to `stream` (stderr), in place of what it had before.

    process: name of this process, told with each line.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter() if stream.isatty() else JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class PlainFormatter(logging.Formatter):
    """Time, level, logger and message, then the request's id if there is one."""

    def __init__(self) -> None:
        super().__init__(_PLAIN, datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        request_id = getattr(record, "request_id", "")
        text = super().formatMessage(record)
        return f"{text} [{request_id}]" if request_id else text


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time (UTC, ISO 8601), level, process, logger, message, request_id, exception."""

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
        if request_id := getattr(record, "request_id", ""):
            entry["request_id"] = str(request_id)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True)
