"""Borrowing KV: a decode worker that holds a conversation's beginning lends it, where that is faster than to compute it anew.

the job's own ticket says how much its owner holds; this worker lacks some of it
    offer a ticket over the blocks of what is lacking --KvBorrow--> the owner sends it by a handoff of its own
        TicketCommitted: the prompt goes on from there
        TicketDead:      it is computed here after all
"""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.rows import wants_prompt_logprobs
from baton.linear_fit import LinearFit
from kv_transfer.kv_sender import KvSender
from kv_transfer.ticket import TicketCommitted, TicketDead
from kv_transfer.tickets import Tickets
from prefill_svc.job import PrefillJob, Stage

#: Fewer tokens are never borrowed: the round trip alone takes longer.
MIN_BORROWED_TOKENS = 32
#: Assumed until KV was borrowed: seconds of a round trip, and bytes a second.
_ASSUMED_FIXED_S, _ASSUMED_BYTES_PER_S = 0.005, 5e8
#: While computing is reckoned faster, one chance in so many is borrowed all the same, to know what it takes.
_TRY_EVERY = 50


class BorrowCosts:
    """Whether to borrow, by what computing and borrowing took lately."""

    def __init__(self, token_bytes: int) -> None:
        """token_bytes: of KV of one token."""
        self._token_bytes = token_bytes
        self._compute = LinearFit()
        self._borrow = LinearFit()
        self._num_chances = 0

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts."""
        self._compute.observe(num_tokens, seconds)

    def observe_borrowed(self, num_tokens: int, seconds: float) -> None:
        """KV of so many tokens was borrowed."""
        self._borrow.observe(num_tokens, seconds)

    def is_borrowing_faster(self, num_tokens: int) -> bool:
        """Or worth a try. Nothing is borrowed before it is known what computing takes."""
        if num_tokens < MIN_BORROWED_TOKENS or not self._compute.num_observations:
            return False
        if self._borrow.num_observations:
            borrow_s = self._borrow.predict(num_tokens)
        else:
            borrow_s = _ASSUMED_FIXED_S + num_tokens * self._token_bytes / _ASSUMED_BYTES_PER_S
        self._num_chances += 1
        is_try = self._num_chances % _TRY_EVERY == 0
        return is_try or borrow_s < self._compute.predict(num_tokens)


class Borrowing:
    """Owns the tickets of what is on its way here."""

    def __init__(
        self, tickets: Tickets, sender: KvSender, costs: BorrowCosts, clock: Callable[[], float]
    ) -> None:
        """clock: monotonic seconds."""
        self._tickets = tickets
        self._sender = sender
        self.costs = costs
        self._clock = clock
        self._jobs: dict[int, tuple[PrefillJob, float]] = {}
        """By ticket: the job, and when it asked."""

    def expire(self) -> None:
        self._tickets.expire()

    def begin(self, job: PrefillJob) -> bool:
        """Ask for what the job's destination holds and this worker lacks. False if there is nothing, or it costs more."""
        num_held = min(job.num_held_tokens, job.spec.num_tokens - 1)
        num_lacking = num_held - job.num_computed_tokens
        if not job.has_ticket or num_lacking <= 0 or wants_prompt_logprobs(job.spec):
            return False
        if not self.costs.is_borrowing_faster(num_lacking):
            return False
        offered = self._tickets.offer(job.spec, job.block_ids, job.num_computed_tokens, num_held)
        job.borrow_ticket_id = offered.ticket_id
        self._jobs[offered.ticket_id] = (job, self._clock())
        self._sender.borrow(job.key, offered.data)
        return True

    def give_up(self, job: PrefillJob) -> None:
        """What is on its way is not wanted any more: settle() tells when nobody writes the blocks."""
        if job.borrow_ticket_id is not None:
            self._tickets.abort(job.borrow_ticket_id, "CANCELLED", "the prompt was given up")

    def settle(self, end: TicketCommitted | TicketDead) -> PrefillJob:
        """The KV is here, or will not come. The job owns its blocks alone again."""
        self._tickets.release(end.ticket_id)
        job, asked_s = self._jobs.pop(end.ticket_id)
        job.borrow_ticket_id = None
        if isinstance(end, TicketCommitted) and job.stage is Stage.BORROWING:
            num_borrowed = end.num_tokens - job.num_computed_tokens
            self.costs.observe_borrowed(num_borrowed, self._clock() - asked_s)
            job.num_borrowed_tokens = num_borrowed
            job.num_computed_tokens = end.num_tokens
            if job.lease:
                job.lease.index(job.spec.token_ids, end.num_tokens)
        return job
