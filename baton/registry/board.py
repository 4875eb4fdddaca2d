"""A board: each of several processes leaves a note there and reads those of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Board(Protocol):
    """Notes of processes, for a few seconds each."""

    async def exchange(self, note: str) -> Mapping[str, str]:
        """Replace this process's note, and return those of others, by a name that each keeps for
        its life. Empty while nobody can know."""
        ...

    async def close(self) -> None:
        """End its connection."""
        ...
