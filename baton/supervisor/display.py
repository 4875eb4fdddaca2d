"""Start display of `baton serve`: one line per process with its phase, redrawn on a terminal,
printed elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from baton.supervisor.log_lines import forward_to_stderr, write_if_possible

_WIDTH = 12
_UP, _CLEAR_BELOW = "\x1b[{}A", "\x1b[J"


class StartDisplay:
    """Active until the cluster is ready. Log lines of that time are printed above it on a
    terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._is_live = self._out.isatty()
        self._begin = time.monotonic()
        self._phases: dict[str, str] = {}
        self._num_drawn = 0
        self._is_over = False

    def on_phase(self, name: str, phase: str) -> None:
        """Show a child's phase. Ignored after `end`: restarts are in the log."""
        if self._is_over:
            return
        text = f"{time.monotonic() - self._begin:5.1f} s  {name:<{_WIDTH}} {phase}"
        self._phases[name] = text
        if self._is_live:
            self._draw()
        else:
            self._write(f"{text}\n")

    def on_line(self, name: str, line: str) -> None:
        """Print a line of a child's log."""
        self._erase()
        forward_to_stderr(name, line)
        if self._is_live and not self._is_over:
            self._draw()

    def end(self) -> None:
        """Keep the lines; later output goes below."""
        self._num_drawn = 0
        self._is_over = True

    def _draw(self) -> None:
        self._erase()
        self._num_drawn = len(self._phases)
        self._write("".join(f"{text}\n" for text in self._phases.values()))

    def _erase(self) -> None:
        if self._num_drawn:
            self._write(_UP.format(self._num_drawn) + _CLEAR_BELOW)
            self._num_drawn = 0

    def _write(self, text: str) -> None:
        write_if_possible(self._out, text)
