"""Finds stop strings in text that arrives in pieces. Pure; the result does not depend on where the
pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What a feed came to. text: may be released now. stop: the stop string that was found, if one
    was."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Holds back the longest end of the text that may still become a stop string.

    The match that ends first wins; of those that end together, the one that begins first.
    """

    def __init__(self, stops: Sequence[str], *, is_stop_included: bool) -> None:
        """`stops`: at least one, none empty."""
        self._stops = tuple(stops)
        self._is_stop_included = is_stop_included
        self._longest = max(map(len, stops))
        self._held = ""

    def copy(self) -> StopMatcher:
        """A matcher in the same state."""
        other = StopMatcher(self._stops, is_stop_included=self._is_stop_included)
        other._held = self._held
        return other

    def feed(self, text: str) -> StopMatch:
        """Add text. Once a stop string is found, feed no more."""
        held = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := held.find(stop)) >= 0
        ]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return StopMatch(held[: end if self._is_stop_included else start], stop)
        num_kept = self._num_undecided(held)
        self._held = held[len(held) - num_kept :]
        return StopMatch(held[: len(held) - num_kept])

    def flush(self) -> str:
        """What is still held, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for num in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-num:]
            if any(stop.startswith(end) for stop in self._stops):
                return num
        return 0
