"""Measures the phases of a process's start."""

from __future__ import annotations

import time


class PhaseClock:
    """`phases`: seconds of each, in order."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last_s = time.monotonic()

    def lap(self, phase: str) -> None:
        """A phase has ended, and the next one begins."""
        now_s = time.monotonic()
        self.phases[phase] = now_s - self._last_s
        self._last_s = now_s
