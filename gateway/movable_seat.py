"""A choice's seat that may change from one decode worker to another while its tokens go on.

    here                                      there
    pause ──Paused──> open ─────────────────> Offered
      send the KV <────────── ticket ───────────┘
      HandedOff                               Committed ──> tokens go on from there

Nobody owns the sequence twice: it goes on there once tokens come from there, and until then here. If anything goes wrong
before the KV is there, it is resumed here if it still is here; what is in neither place is placed anew as after any loss.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton.errors import BatonError, HandoffFailed
from baton.events import Deferred, HandedOff, HandOffFailed, Paused, Preempted, Tokens
from baton.types import Rank, SequenceSpec
from gateway.attempt import Attempt
from gateway.choice import ChoiceEvent, Left, SeatEvent
from gateway.placement import Placement
from gateway.seat import Nudge, Seat

#: How long a decode worker may take to pause a sequence; it goes on there after that.
PAUSE_TIMEOUT_S = 10.0

#: How long the KV may take from the giving of the ticket to the first token there.
HANDOFF_TIMEOUT_S = 30.0


class Passenger(Protocol):
    """What is moved: one choice of a request."""

    @property
    def rank(self) -> Rank: ...

    @property
    def num_tokens(self) -> int:
        """Of prompt and output, those that were taken."""
        ...

    def spec_so_far(self) -> SequenceSpec:
        """As a sequence of its own, with the tokens that were taken."""
        ...

    def open_at(self, placement: Placement, hand_over: Callable[[bytes], None]) -> Attempt:
        """An attempt for `spec_so_far`, not opened."""
        ...

    def has_moved(self, placement: Placement) -> None:
        """It runs there now."""
        ...


@dataclass(slots=True, eq=False)
class _Move:
    """One move, from its order to its end. The target is the move's until the passenger sits there."""

    placement: Placement
    on_end: Callable[[], None]
    target: Attempt | None = None
    timer: asyncio.TimerHandle | None = None
    is_ticket_given: bool = False
    is_handed_off: bool = False
    failure: Left | None = None
    """Why there is no place there, while the word from here is awaited."""


class MovableSeat:
    """Owns the seat that it is given, and those that follow."""

    def __init__(self, seat: Seat, passenger: Passenger) -> None:
        self._seat = seat
        self._passenger = passenger
        self._loop = asyncio.get_running_loop()
        self._pending: deque[SeatEvent | Nudge] = deque()
        self._move: _Move | None = None
        self._is_awaited = False

    @property
    def placement(self) -> Placement:
        return self._seat.placement

    @property
    def passenger(self) -> Passenger:
        return self._passenger

    @property
    def is_movable(self) -> bool:
        """Whether a move may be ordered now: not while the client is slow to take what came, which would hold it up."""
        return self._move is None and self._is_awaited and self._seat.is_decoding

    def order(self, placement: Placement, on_end: Callable[[], None]) -> None:
        """Move to a place that was claimed. `on_end` is called once: there, or here again, or gone from both."""
        self._move = _Move(placement, on_end)
        self._nudge(partial(self._pause, self._move))

    async def take_all(self) -> list[ChoiceEvent]:
        """What came to the choice, at least one event; moves go on meanwhile."""
        taken: list[ChoiceEvent] = []
        while not taken:
            if not self._pending:
                self._pending.extend(await self._next_events())
            # Tokens are taken by the caller before anything else becomes of the sequence.
            while self._pending and isinstance(self._pending[0], Tokens):
                taken.append(self._pending.popleft())  # type: ignore[arg-type]
            if not taken and self._pending:
                left = self._turn(self._pending.popleft())
                if left is not None:
                    taken.append(left)
        return taken

    async def _next_events(self) -> list[SeatEvent | Nudge]:
        self._is_awaited = True
        try:
            return await self._seat.inbox.take_all()
        finally:
            self._is_awaited = False

    def close(self) -> None:
        """Give back all that is held here and there. Idempotent."""
        self._end_move()
        self._seat.close()

    def _nudge(self, nudge: Nudge) -> None:
        self._seat.inbox.put(nudge)

    def _turn(self, event: SeatEvent | Nudge) -> Left | None:
        match event:
            case Paused():
                self._open_there()
            case HandedOff():
                return self._handed_off()
            case HandOffFailed(_, why):
                self._hand_off_failed(why)
            case Deferred() | Preempted() | BatonError():
                return self._lose(event)
            case Tokens():
                raise TypeError("tokens are the caller's")
            case _:
                return event()
        return None

    def _pause(self, move: _Move) -> None:
        if move is self._move:
            self._seat.pause()
            self._limit(move, PAUSE_TIMEOUT_S)

    def _open_there(self) -> None:
        move = self._move
        if move is None or move.target is not None:
            return  # given up since, and told to go on
        self._stop_timer(move)
        move.target = self._passenger.open_at(move.placement, partial(self._give_ticket, move))
        move.target.when_parted(lambda left: self._nudge(partial(self._arrive, move, left)))
        move.target.open()

    def _give_ticket(self, move: _Move, ticket: bytes) -> None:
        move.is_ticket_given = True
        self._seat.hand_off(ticket)
        self._limit(move, HANDOFF_TIMEOUT_S)

    def _arrive(self, move: _Move, left: Left | None) -> Left | None:
        """Tokens have come from there; or none will, for the reason given."""
        if move is not self._move or move.target is None:
            return None
        if left is None:
            self._change_seats(move, move.target)
            return None
        move.target.close()
        if move.is_handed_off:
            self._end_move()
            return left
        if move.is_ticket_given:
            move.failure = left
        else:
            self._stay_here()
        return None

    def _handed_off(self) -> Left | None:
        """Nothing is here any more."""
        move = self._move
        if move is None:
            return HandoffFailed("the sequence was handed off without being told to")
        move.is_handed_off = True
        if move.failure is not None:
            self._end_move()
        return move.failure

    def _hand_off_failed(self, why: str) -> None:
        """The KV is here still; there, too, if only the worker here does not know it."""
        move = self._move
        if move is not None and self._has_kv_there(move):
            return
        if move is not None and move.is_ticket_given and move.failure is None:
            sender = self.placement.decode
            move.placement.note_undelivered(sender, why, self._loop.time())
        self._stay_here()

    def _lose(self, left: Left) -> Left | None:
        """The worker here has let go of it, which does not matter if the other one has it."""
        if self._move is not None and self._has_kv_there(self._move):
            self._move.is_handed_off = True
            return None
        self._end_move()
        return left

    def _time_is_over(self, move: _Move) -> Left | None:
        if move is not self._move:
            return None
        if move.target is None:
            self._stay_here()
            return None
        self._end_move()
        return HandoffFailed(f"a move took more than {HANDOFF_TIMEOUT_S:g} s")

    @staticmethod
    def _has_kv_there(move: _Move) -> bool:
        return move.target is not None and move.target.is_open and move.target.has_kv

    def _change_seats(self, move: _Move, target: Attempt) -> None:
        here, self._seat = self._seat, target.seats[0]
        self._pending.clear()
        move.target = None  # the seat is ours now
        self._stop_timer(move)
        self._move = None
        here.close()
        self._passenger.has_moved(target.placement)
        move.on_end()

    def _stay_here(self) -> None:
        self._end_move()
        self._seat.resume()

    def _end_move(self) -> None:
        move, self._move = self._move, None
        if move is None:
            return
        self._stop_timer(move)
        if move.target is not None:
            move.target.close()
        else:
            move.placement.release()
        move.on_end()

    def _limit(self, move: _Move, limit_s: float) -> None:
        self._stop_timer(move)
        over = partial(self._nudge, partial(self._time_is_over, move))
        move.timer = self._loop.call_later(limit_s, over)

    @staticmethod
    def _stop_timer(move: _Move) -> None:
        if move.timer is not None:
            move.timer.cancel()
            move.timer = None
