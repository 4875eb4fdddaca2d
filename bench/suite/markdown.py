"""Generated parts of a page, between marks in hand-written text, and their elements: tables,
conditions of a measurement, goals. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VERSIONS = ("python", "torch", "transformers", "llama-cpp-python", "grpcio")
NOT_MEASURED = "Not measured yet: run `make bench`."


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are Markdown."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def about(document: Mapping[str, Any]) -> str:
    """One paragraph: when, on what, how busy it was, with which versions, and by which command."""
    machine = document["machine"]
    versions = [f"{name} {v}" for name, v in document["versions"].items() if name in _VERSIONS]
    if before := document.get("load_average_before"):
        load = f"load average {before[0]:.1f} before and {machine['load_average'][0]:.1f} after"
    else:
        load = f"load average {machine['load_average'][0]:.1f} after"
    commit = document.get("git", {}).get("commit", "")[:10]
    when = document["started"].replace("T", " ").removesuffix("+00:00")
    at_level = f", kernels at {machine['cpu_level']}" if "cpu_level" in machine else ""
    where = f"{machine['cpu'].strip()}, {machine['num_cores']} cores{at_level}"
    parts = [where, load, ", ".join(versions), *([f"commit {commit}"] if commit else [])]
    command = " ".join(document["command"])
    return f"Measured on {when} UTC: {'; '.join(parts)}. By `{command}`."


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound that each of some figures should keep."""

    text: str
    bound: float
    is_at_most: bool = False

    def is_met_by(self, value: float) -> bool:
        return value <= self.bound if self.is_at_most else value >= self.bound


def goal_line(goal: Goal, values: Mapping[str, float], unit: str = "") -> str:
    """One item of a list: the goal, and each figure with whether it is met."""
    if not values:
        return f"* {goal.text}: not measured."
    parts = [
        f"{name} {number(value)}{unit} ({'met' if goal.is_met_by(value) else '**missed**'})"
        for name, value in values.items()
    ]
    return f"* {goal.text}: {', '.join(parts)}."


def number(value: float) -> str:
    """Two to three digits that count, thousands with commas."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    if abs(value) >= 0.1 or value == 0:
        return f"{value:.2f}"
    return f"{value:.2g}"


_MARKED = re.compile(r"^<!-- begin: (\S+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)


class PageError(ValueError):
    """A page has not the marks that it should have."""


def names_in(page: str) -> list[str]:
    """Names of the generated parts, in order."""
    return [match[1] for match in _MARKED.finditer(page)]


def part_of(page: str, name: str) -> str:
    """What stands between one pair of marks. Raises PageError if there is none, or more than
    one."""
    found = [match[2] for match in _MARKED.finditer(page) if match[1] == name]
    if len(found) != 1:
        raise PageError(f"{len(found)} parts are marked {name!r}; there has to be one")
    return found[0]


def replaced(page: str, name: str, body: str) -> str:
    """The page with another body between one pair of marks, and else the same. Raises PageError."""
    part_of(page, name)
    return _MARKED.sub(
        lambda m: f"<!-- begin: {name} -->\n{body.strip()}\n<!-- end -->" if m[1] == name else m[0],
        page,
    )


def write_part(path: Path, name: str, body: str) -> None:
    """Replace a part of a page on disk; see replaced. Raises PageError, OSError."""
    path.write_text(replaced(path.read_text(encoding="utf-8"), name, body), encoding="utf-8")
