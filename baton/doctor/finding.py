"""What one check of the doctor found."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Level(enum.StrEnum):
    """OK; WARNING: it serves, but not as well as it could; PROBLEM: it cannot serve."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """check: what was looked at. found: what there is. fix: what to do; empty if all is well."""

    check: str
    level: Level
    found: str
    fix: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def warning(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Level.WARNING, found, fix)


def problem(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Level.PROBLEM, found, fix)


def from_json(entry: Mapping[str, Any]) -> Finding:
    """The finding that dataclasses.asdict made `entry` of."""
    return Finding(entry["check"], Level(entry["level"]), entry["found"], entry["fix"])
