"""Result of one check of the doctor."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Level(enum.StrEnum):
    """OK; WARNING: serves with restrictions; PROBLEM: cannot serve."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """check: subject of the check. found: result. fix: what to do; empty if all is well."""

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
    """The inverse of dataclasses.asdict."""
    return Finding(entry["check"], Level(entry["level"]), entry["found"], entry["fix"])
