"""Fetching a prefix from a sequence's destination, where that is faster than to compute it: in a
conversation the decode worker has the KV of what was said before.

    the destination's ticket says how much it holds; this worker lacks some of it
    offer a ticket over the blocks of what is lacking
        ──PrefixFetch──> the destination sends it by a handoff of its own
        TicketCommitted: the prompt goes on from there
        TicketDead:      it is computed here after all
"""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.interface import wants_prompt_logprobs
from kv_transfer.ticket import TicketCommitted, TicketDead
from kv_transfer.tickets import Tickets
from worker_core.commands import Destination
from worker_core.costs import Costs
from worker_core.handoff import Handoffs
from worker_core.sequence import Stage, WorkerSequence
from worker_core.state import CoreState

#: A destination that shows no sign of life for this long, in seconds, is not waited for: the prompt
#: is computed.
FETCH_LEASE_S = 2.0


class PrefixFetches:
    """Owns the tickets of prefixes that are on their way here."""

    def __init__(
        self,
        state: CoreState,
        tickets: Tickets,
        costs: Costs,
        handoffs: Handoffs,
        clock: Callable[[], float],
    ) -> None:
        """clock: monotonic seconds."""
        self._state = state
        self._tickets = tickets
        self._costs = costs
        self._handoffs = handoffs
        self._clock = clock
        self._by_ticket: dict[int, tuple[WorkerSequence, float]] = {}
        """The sequence, and when it asked."""

    def begin(self, sequence: WorkerSequence, destination: Destination) -> None:
        """Ask for what the destination holds and this worker lacks, unless there is nothing, or it
        costs more."""
        num_computed = sequence.num_computed_tokens
        num_held = min(destination.num_held_tokens, sequence.spec.num_tokens - 1)
        num_lacking = num_held - num_computed
        if num_lacking <= 0 or wants_prompt_logprobs(sequence.spec):
            return
        if not self._costs.is_fetch_cheaper(num_lacking):
            return
        block_ids = tuple(sequence.lease.block_ids)
        offered = self._tickets.offer(
            sequence.spec, block_ids, num_computed, num_held, FETCH_LEASE_S
        )
        sequence.stage = Stage.FETCHING
        sequence.ticket_id = offered.ticket_id
        self._by_ticket[offered.ticket_id] = (sequence, self._clock())
        self._handoffs.fetch(sequence, offered.data)

    def on_committed(self, committed: TicketCommitted) -> None:
        """The prefix is here."""
        sequence, asked_s = self._release(committed.ticket_id)
        if sequence.stage is not Stage.FETCHING:
            self._state.leave(sequence)
            return
        num_fetched = committed.num_tokens - sequence.num_computed_tokens
        self._costs.observe_fetch(num_fetched, self._clock() - asked_s)
        sequence.num_computed_tokens = committed.num_tokens
        sequence.lease.index(sequence.token_ids, committed.num_tokens)
        if sequence.prefill:
            sequence.prefill.num_fetched_tokens = num_fetched
        sequence.stage = Stage.RUNNING

    def on_aborted(self, aborted: TicketDead) -> None:
        """The prefix will not come: it is computed, unless the sequence was given up."""
        sequence, _ = self._release(aborted.ticket_id)
        if sequence.stage is Stage.FETCHING:
            sequence.stage = Stage.RUNNING
        else:
            self._state.leave(sequence)

    def _release(self, ticket_id: int) -> tuple[WorkerSequence, float]:
        """Nobody writes the blocks any more. The table has released the ticket."""
        sequence, asked_s = self._by_ticket.pop(ticket_id)
        sequence.ticket_id = None
        return sequence, asked_s
