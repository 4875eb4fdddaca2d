"""Long work on the event loop in pieces of a few milliseconds, between which other tasks run."""

from __future__ import annotations

import asyncio
from collections import deque
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


class Turns:
    """Starts of requests, one per iteration of the event loop and in order of arrival, so that
    running streams are served between them. Belongs to one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Return at once if nobody else had a turn in this iteration, else in a later one."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._pass_on)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _pass_on(self) -> None:
        while self._waiting and self._waiting[0].done():  # cancelled
            self._waiting.popleft()
        self._is_taken = bool(self._waiting)
        if self._waiting:
            self._waiting.popleft().set_result(None)
            asyncio.get_running_loop().call_soon(self._pass_on)


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
