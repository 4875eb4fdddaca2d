"""Whether a sequence may come in, and where its KV comes from: by a ticket, or computed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.admission import refusal
from baton.engine.rows import wants_prompt_logprobs
from baton.errors import BatonError, Draining, InvalidRequest
from baton.events import Committed, DecodeEvent, Deferred, Failed, Offered, PrefillsHere
from baton.grammar import Matchers
from baton.types import KvSource, SequenceSpec
from decode_svc.commands import Open
from decode_svc.costs import Costs
from decode_svc.sequence import DecodeSequence, Stage
from decode_svc.state import DecodeState, failed, width
from kv_transfer.ticket import TicketCommitted, TicketDead
from kv_transfer.tickets import Tickets


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """max_num_launches: steps that the engine may have been given at once, 1 or 2; at most what its spec says."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_launches: int = 1

    @property
    def max_width(self) -> int:
        """Most choices or beams of one sequence."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


class Admission:
    """Owns the tickets of sequences that await KV."""

    def __init__(
        self,
        state: DecodeState,
        tickets: Tickets,
        limits: DecodeLimits,
        costs: Costs,
        matchers: Matchers,
        clock: Callable[[], float],
    ) -> None:
        """clock: monotonic seconds."""
        self._state = state
        self._tickets = tickets
        self._limits = limits
        self._costs = costs
        self._matchers = matchers
        self._clock = clock
        self._by_ticket: dict[int, DecodeSequence] = {}
        self.is_draining = False

    @property
    def num_open_tickets(self) -> int:
        return len(self._by_ticket)

    @property
    def local_prefill_threshold(self) -> int:
        """Most missing tokens that are computed here, as things are, rather than awaited by a ticket."""
        return self._costs.local_prefill_threshold(self._state.num_decoding)

    def expire(self) -> None:
        self._tickets.expire()

    def open(self, command: Open) -> None:
        error = self._refusal(command.spec)
        answer = failed(error) if error else self._admit(command)
        self._state.tell(command.stream, command.handle, answer)

    def join(self, committed: TicketCommitted) -> DecodeSequence | None:
        """The sequence runs now, and all its KV is here; None if nobody wants it any more."""
        sequence = self._settle(committed.ticket_id)
        if sequence.stage is Stage.ABANDONED:
            self._state.leave(sequence)
            return None
        num_missing = committed.num_tokens - sequence.num_computed_tokens
        if committed.firsts:  # of a whole prefill, not only of a transfer
            self._costs.observe_handoff(num_missing, self._clock() - sequence.offered_s)
        sequence.stage = Stage.RUNNING
        sequence.num_computed_tokens = committed.num_tokens
        sequence.lease.index(sequence.token_ids, committed.num_tokens)
        event = Committed(committed.transfer_exposed_ms, committed.num_bytes)
        self._state.emit(sequence, event)
        return sequence

    def awaiting(self, ticket_id: int) -> DecodeSequence | None:
        """The sequence whose KV the ticket is for, until the ticket's end."""
        return self._by_ticket.get(ticket_id)

    def bury(self, dead: TicketDead) -> None:
        """The sequence's KV will not come."""
        sequence = self._settle(dead.ticket_id)
        if sequence.stage is not Stage.ABANDONED:
            self._state.emit(sequence, Failed(dead.reason, dead.message, is_retriable=True))
        self._state.leave(sequence)

    def abandon(self, sequence: DecodeSequence) -> None:
        """Nobody wants a sequence that awaits KV any more: its blocks wait for the ticket's end."""
        sequence.stage = Stage.ABANDONED
        if sequence.ticket_id is not None:
            message = "the gateway gave the request up"
            self._tickets.abort(sequence.ticket_id, "CANCELLED", message)

    def _settle(self, ticket_id: int) -> DecodeSequence:
        """The ticket has had its last event: its sequence alone owns the blocks now."""
        self._tickets.release(ticket_id)
        sequence = self._by_ticket.pop(ticket_id)
        sequence.ticket_id = None
        return sequence

    def _refusal(self, spec: SequenceSpec) -> BatonError | None:
        if self.is_draining:
            return Draining("this decode worker takes no more sequences")
        return refusal(spec, self._state.spec) or self._never_fits(spec)

    def _never_fits(self, spec: SequenceSpec) -> InvalidRequest | None:
        """Why the sequence could not run here even if all else were gone; None if it could."""
        num_wide, most = width(spec), self._limits.max_width
        if num_wide > most:
            return InvalidRequest(f"{num_wide} choices or beams; this worker runs at most {most}")
        if spec.sampling.beam is None:
            return None
        pool = self._state.pool
        longest = min(spec.sampling.max_tokens, self._state.spec.max_model_len - spec.num_tokens)
        num_own = pool.num_blocks_for(longest) + 1
        num_blocks = spec.num_tokens // pool.block_size + num_wide * num_own
        if num_blocks <= pool.num_blocks:
            return None
        return InvalidRequest(
            f"sampling.beam_search: {num_wide} beams of {longest} tokens may take {num_blocks} "
            f"blocks of {pool.num_blocks}; lower max_tokens or the width"
        )

    def _admit(self, command: Open) -> DecodeEvent:
        state, spec = self._state, command.spec
        num_places, num_wide = state.num_places, width(spec)
        if num_places + num_wide > self._limits.max_num_seqs:
            return Deferred(f"{num_places} of {self._limits.max_num_seqs} places are taken")
        if not state.swap.is_empty:
            return Deferred("sequences that were swapped out come back first")
        is_scored_here = wants_prompt_logprobs(spec) and command.source is KvSource.HERE
        lease = state.pool.lease(
            spec.tenant,
            spec.token_ids,
            spec.num_tokens + 1,
            shares_prefixes=state.shares_prefixes(spec) and not is_scored_here,
        )
        if lease is None:
            return Deferred("no room for the prompt's blocks")
        if state.pool.num_available < num_places + num_wide - 1:
            lease.release()  # each sequence here must be able to grow before a new one comes
            return Deferred("the sequences that run need the blocks that are left")
        num_cached = lease.num_cached_tokens
        sequence = DecodeSequence(
            command.stream,
            command.handle,
            spec,
            lease,
            Stage.RUNNING,
            num_cached,
            order=self._matchers.order(spec.sampling),
        )
        state.put(sequence)
        if self._is_computed_here(command, num_cached):
            return PrefillsHere(num_cached)
        return self._offer(sequence, command.source)

    def _is_computed_here(self, command: Open, num_cached_tokens: int) -> bool:
        """Whether what is missing of a sequence is computed here rather than awaited."""
        num_missing = command.spec.num_tokens - num_cached_tokens
        match command.source:
            case KvSource.HERE:
                return True
            case KvSource.DECODE_WORKER:
                return num_missing == 1
            case KvSource.PREFILL_WORKER:
                is_short = num_missing <= self.local_prefill_threshold
                return is_short and not wants_prompt_logprobs(command.spec)

    def _offer(self, sequence: DecodeSequence, source: KvSource) -> Offered:
        spec = sequence.spec
        # The last token of a sequence that ran elsewhere has no KV yet: it is computed here, in the next step.
        num_tokens = spec.num_tokens - (source is KvSource.DECODE_WORKER)
        num_cached = sequence.num_computed_tokens
        block_ids = tuple(sequence.lease.block_ids)
        offered = self._tickets.offer(spec, block_ids, num_cached, num_tokens)
        sequence.stage = Stage.AWAITING_KV
        sequence.ticket_id = offered.ticket_id
        sequence.offered_s = self._clock()
        self._by_ticket[offered.ticket_id] = sequence
        return Offered(offered.data, num_cached)
