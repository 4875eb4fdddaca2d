"""Work on the event loop that takes milliseconds: others run between its pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")

#: Bytes, characters or tokens from which on a piece of work may take milliseconds.
LONG_PIECE = 65_536

#: What others get between two pieces, in seconds: about as long as a piece takes, and enough for a
#: worker's message to become text on its way to a client, which takes several turns of the loop.
_PAUSE_S = 0.005


async def let_others_run(size: int) -> None:
    """Between two pieces of work on so many bytes, characters or tokens; nothing if they are
    few."""
    if size >= LONG_PIECE:
        await asyncio.sleep(_PAUSE_S)


class Pacer:
    """Lets others run whenever a long piece of many small ones is done."""

    def __init__(self) -> None:
        self._size = 0

    async def advance(self, size: int) -> None:
        """So many more bytes, characters or tokens."""
        self._size += size
        if self._size >= LONG_PIECE:
            done, self._size = self._size, 0
            await let_others_run(done)


async def in_pieces(
    values: Sequence[_T], take: Callable[[Sequence[_T]], object], size: int = LONG_PIECE
) -> None:
    """Have all of them taken, at most so many at a time; others run before each but the first. Not
    an iterator, for an asynchronous one costs a short request as much as its own work."""
    for begin in range(0, len(values), size):
        if begin:
            await let_others_run(LONG_PIECE)
        take(values[begin : begin + size])


async def as_tuple(token_ids: Sequence[int]) -> tuple[int, ...]:
    """The same ids."""
    made: list[int] = []
    await in_pieces(token_ids, made.extend)
    return tuple(made)
