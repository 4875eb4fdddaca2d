"""The last handoffs that ended well, for the page's live map."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

_NUM_KEPT = 64


@dataclass(frozen=True, slots=True)
class Handoff:
    """A sequence's KV has moved. source, target: ids of workers. num_bytes: that were sent."""

    source: str
    target: str
    num_bytes: int


class RecentHandoffs:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self.total = 0
        """Since the start of this process."""
        self.total_bytes = 0
        self._last: deque[Handoff] = deque(maxlen=_NUM_KEPT)

    def add(self, handoff: Handoff) -> None:
        self.total += 1
        self.total_bytes += handoff.num_bytes
        self._last.append(handoff)

    def numbered(self) -> Iterator[tuple[int, Handoff]]:
        """The last ones in order, each with how many there were up to it."""
        return enumerate(self._last, self.total - len(self._last) + 1)
