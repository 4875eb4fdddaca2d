"""Long work on the event loop in pieces of a few milliseconds, between which other tasks run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")

#: Bytes, characters or tokens above which one call may take milliseconds.
LONG_PIECE = 65_536

#: Pause between pieces, in seconds: about as long as a piece, and long enough for a worker's
#: message to reach a client, which takes several loop iterations.
_PAUSE_S = 0.005


async def let_others_run(size: int) -> None:
    """Pause after work on `size` bytes, characters or tokens. No-op below LONG_PIECE."""
    if size >= LONG_PIECE:
        await asyncio.sleep(_PAUSE_S)


class Pacer:
    """Pauses whenever small steps add up to LONG_PIECE."""

    def __init__(self) -> None:
        self._size = 0

    async def advance(self, size: int) -> None:
        """Count `size` more bytes, characters or tokens, and pause if due."""
        self._size += size
        if self._size >= LONG_PIECE:
            done, self._size = self._size, 0
            await let_others_run(done)


async def in_pieces(
    values: Sequence[_T], take: Callable[[Sequence[_T]], object], size: int = LONG_PIECE
) -> None:
    """Call `take` on consecutive slices of at most `size` values, with pauses in between. Not an
    async generator, because that would double the cost of a short request."""
    for begin in range(0, len(values), size):
        if begin:
            await let_others_run(LONG_PIECE)
        take(values[begin : begin + size])


async def as_tuple(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the ids as a tuple, copied in pieces."""
    made: list[int] = []
    await in_pieces(token_ids, made.extend)
    return tuple(made)
