"""Logging of a process: plain lines on a terminal, JSON lines elsewhere. Both name the request.

python-json-logger is not used, because it writes everything in `extra` and upper-case levels;
changing both takes as many lines.

A message names a request if it is logged with `extra={"request_id": ...}`, and a trace by
"trace_id" there.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import IO

from baton.config import LogLevel

#: Maximum warnings and errors of one line of code, and the interval in seconds.
MAX_ALIKE, ALIKE_S = 100, 60.0

#: What a record may say about where it belongs, in the order of the lines.
_IDS = ("request_id", "trace_id")

_PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure_logging(level: LogLevel, process: str, stream: IO[str] | None = None) -> None:
    """Send the root logger's messages from `level` on to `stream` (stderr), in place of what it had
    before.

    process: name of this process, part of each line.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter() if stream.isatty() else JsonFormatter(process))
    handler.addFilter(AlikeLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class AlikeLimit(logging.Filter):
    """Passes at most MAX_ALIKE warnings and errors of one line of code in ALIKE_S seconds, so that
    clients cannot fill the disk.

    The first one of the next interval says how many were dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._since_s: dict[tuple[str, int], float] = {}
        self._counts: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        line = (record.pathname, record.lineno)
        since_s, count = self._since_s.get(line, record.created), self._counts.get(line, 0)
        # The machine's clock may have been set back.
        if abs(record.created - since_s) >= ALIKE_S:
            since_s, num_left_out, count = record.created, max(0, count - MAX_ALIKE), 0
            if num_left_out:
                record.msg = f"{record.msg} ({num_left_out} like it were left out before)"
        self._since_s[line], self._counts[line] = since_s, count + 1
        return count < MAX_ALIKE


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
