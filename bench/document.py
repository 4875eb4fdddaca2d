"""A result as it is kept: what was measured, with the command, the time, the machine, the versions
and the commit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.machine import describe_commit, describe_machine, describe_versions


def now() -> str:
    """Date and time, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def document_of(module: str, started: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Made when the measurement ends: its load average is that of the machine then, this
    measurement's own included."""
    return {
        "command": ["python", "-m", module, *map(shown, sys.argv[1:])],
        "started": started,
        "git": describe_commit(),
        "machine": describe_machine(),
        "versions": describe_versions(),
        **data,
    }


def shown(argument: str) -> str:
    """An argument as others may read it: of a file somewhere on this machine, the name."""
    return Path(argument).name if argument.startswith("/") else argument
