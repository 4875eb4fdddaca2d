"""Log lines of children in the supervisor's log."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TextIO


def forward_to_stderr(name: str, line: str) -> None:
    """Write a child's line to stderr: unchanged for machines, readable on a terminal."""
    text = readable(name, line) if sys.stderr.isatty() else line
    write_if_possible(sys.stderr, text + "\n")


def write_if_possible(out: TextIO, text: str) -> None:
    """Write and flush; drop the text if the disk is full or the reader is gone, which must not end
    the processes that it is about."""
    with suppress(OSError):
        out.write(text)
        out.flush()


def readable(name: str, line: str) -> str:
    """Convert a line of baton.logs.JsonFormatter to the form of PlainFormatter; other lines
    stay."""
    try:
        entry = json.loads(line)
        time, level, message = entry["time"], entry["level"], entry["message"]
    except (ValueError, KeyError, TypeError):
        return f"{name}: {line}"
    text = f"{str(time)[11:19]} {str(level).upper():<7} {name}: {message}"
    ids = " ".join(str(entry[name]) for name in ("request_id", "trace_id") if entry.get(name))
    if ids:
        text += f" [{ids}]"
    if exception := entry.get("exception"):
        text += f"\n{exception}"
    return text
