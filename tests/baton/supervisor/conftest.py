"""A cluster of fake services: real processes, real signals, no model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.config import ServeOptions
from baton.supervisor import Cluster, Programs

FAKE = Path(__file__).with_name("fake_service.py")

FAKES = Programs(
    prefill=(sys.executable, str(FAKE), "prefill"),
    decode=(sys.executable, str(FAKE), "decode"),
    gateway=(sys.executable, str(FAKE), "gateway"),
)


async def serves_at_once(_address: str) -> None:
    """The fakes have no health to wait for."""


@dataclass
class Stage:
    """The folder that is the fakes' model, and what the supervisor forwarded of their logs."""

    folder: Path
    lines: list[tuple[str, str]] = field(default_factory=list)
    on_line: Callable[[str, str], None] = lambda _name, _line: None

    def misbehave(self, name: str, how: str) -> None:
        (self.folder / name).write_text(how)

    def journal(self) -> list[str]:
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def cluster(self, **options: object) -> Cluster:
        values = {"model": str(self.folder), "port": 0, **options}
        return Cluster(
            ServeOptions(**values), programs=FAKES, on_line=self._keep, wait_serving=serves_at_once
        )

    def _keep(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self.on_line(name, line)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)
