"""Log lines of children in the supervisor's log."""

from __future__ import annotations

import json
import sys


def forward_to_stderr(name: str, line: str) -> None:
    """Write a child's line to stderr: unchanged for machines, readable on a terminal."""
    text = readable(name, line) if sys.stderr.isatty() else line
    sys.stderr.write(text + "\n")


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
