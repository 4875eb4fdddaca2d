"""Work on the event loop that takes milliseconds: others run between its pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

#: Bytes, characters or tokens from which on a piece of work may take milliseconds.
_LONG_PIECE = 65_536

#: What others get between two pieces, in seconds: about as long as a piece takes, and enough for a
#: worker's message to become text on its way to a client, which takes several turns of the loop.
_PAUSE_S = 0.005


async def let_others_run(size: int) -> None:
    """Between two pieces of work on so many bytes, characters or tokens; nothing if they are
    few."""
    if size >= _LONG_PIECE:
        await asyncio.sleep(_PAUSE_S)


async def as_tuple(token_ids: Sequence[int]) -> tuple[int, ...]:
    """The same ids."""
    made: list[int] = []
    for begin in range(0, len(token_ids), _LONG_PIECE):
        await let_others_run(begin)
        made += token_ids[begin : begin + _LONG_PIECE]
    return tuple(made)
