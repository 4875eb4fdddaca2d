"""Marks of a rank's steps, for the threads that copy its KV.

Rank 0 sends a command and a message about KV on separate connections, and on a GPU the rank's
kernels run after both: a message therefore names the last command that may write KV after it
arrives, and a copy follows the mark that the rank records behind that command's kernels.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

#: Layers of a command that are all launched.
ALL_LAYERS = 1 << 30
#: Marks that are kept. A copy that follows a later one than it needs to waits longer.
_NUM_KEPT = 256


class StepMarks:
    """See KvMarks. `layer_done` and `command_done` are called by the thread that launches."""

    def __init__(self, mark: Callable[[], object]) -> None:
        """mark: of the rank's pool, see KvPool."""
        self._mark = mark
        self._num_commands = 0
        self._reached = threading.Condition()
        self._marks: deque[tuple[tuple[int, int], object]] = deque(maxlen=_NUM_KEPT)
        """By place: the number of a command, and layers of it that are launched."""

    def layer_done(self, layer: int) -> None:
        """The running command's writes to this rank's layer are launched; see LayerDone."""
        self._add((self._num_commands + 1, layer + 1))

    def command_done(self) -> None:
        """All that a command writes is launched."""
        self._num_commands += 1
        self._add((self._num_commands, ALL_LAYERS))

    def _add(self, place: tuple[int, int]) -> None:
        mark = self._mark()
        with self._reached:
            self._marks.append((place, mark))
            self._reached.notify_all()

    def after(self, num_commands: int, num_layers: int = ALL_LAYERS) -> object:
        """See KvMarks."""
        if not num_commands or not num_layers:
            return None
        wanted = (num_commands, num_layers)
        with self._reached:
            self._reached.wait_for(lambda: self._marks and self._marks[-1][0] >= wanted)
            return next(mark for place, mark in self._marks if place >= wanted)
