"""Admission of sequences, and the source of their KV: a ticket, or local computation.

open ──> refused: Failed       it could never run here, or the worker drains
     ├─> no room: Deferred     nothing is kept; or queued, if the policy lets prompts wait here
     └─> admitted: LocalPrefill, or Offered and a ticket

A prompt with a destination may start with a prefix fetch: in a conversation the destination holds
the KV of earlier turns, and fetching it may be faster than computing it.

    the destination's ticket states how much it holds; this worker lacks some of it
    offer a ticket over the blocks of the missing tokens
        ──PrefixFetch──> the destination sends them by a handoff of its own
        TicketCommitted: the prompt continues after them
        TicketAborted:   they are computed here

Before that, whatever the source, blocks that a tier of KV has are fetched into the lease; see
worker_core/prefix_tiers.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import partial

from baton.errors import BatonError, Cancelled, Draining, InvalidRequest
from baton.events import Committed, Deferred, Failed, LocalPrefill, Offered
from baton.types import KvSource, Rank, across_accounts
from engine.grammar import Matchers
from engine.interface import wants_prompt_logprobs
from engine.kv.lease import BlockLease
from kv_transfer.ticket import OfferedTicket, TicketAborted, TicketCommitted
from kv_transfer.ticket_group import Tickets
from worker_core.commands import Destination, Open, SequenceKey
from worker_core.costs import Costs
from worker_core.handoff import Handoffs
from worker_core.late_blocks import LateBlocks, lets_pass, waiting
from worker_core.policy import Policy
from worker_core.prefix_tiers import PrefixTiers
from worker_core.sequence import LocalPrefillProgress, Stage, WorkerSequence
from worker_core.sequence_rules import refusal
from worker_core.state import CoreState, failed


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Limits of a core. max_num_launches: steps in flight at once; at most the engine spec's."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_launches: int = 1


@dataclass(frozen=True, slots=True)
class _Queued:
    """A prompt that waits for blocks and holds none. Its handoff, if it has a destination, has
    begun."""

    key: SequenceKey
    command: Open
    arrived_s: float


#: Seconds without a sign of life from the destination after which a fetched prefix is computed
#: instead.
FETCH_LEASE_S = 2.0


class Admission:
    """Owns the queued prompts, and the tickets of sequences in AWAITING_KV."""

    def __init__(
        self,
        state: CoreState,
        tickets: Tickets,
        limits: CoreLimits,
        costs: Costs,
        matchers: Matchers,
        handoffs: Handoffs,
        tiers: PrefixTiers | None = None,
        late: LateBlocks | None = None,
    ) -> None:
        """tiers: None if KV lies on the device alone. late: None if tickets get all of their blocks
        at once."""
        self._state = state
        self._tiers = tiers
        self._late = late
        self._tickets = tickets
        self._limits = limits
        self._costs = costs
        self._matchers = matchers
        self._handoffs = handoffs
        self._queued: dict[Hashable, _Queued] = {}
        self._without_room: tuple[SequenceKey, tuple[int, ...], int] | None = None
        """The queued prompt that found no blocks, with the pool's room and the growing places."""
        self._by_ticket: dict[int, WorkerSequence] = {}
        """Sequences in stage AWAITING_KV, or in CLOSING after it, by ticket."""
        self._fetching: dict[int, WorkerSequence] = {}
        """Sequences in stage FETCHING, or in CLOSING after it, by the ticket of the prefix."""
        self._unannounced: dict[int, bytes] = {}
        """Tickets that cannot be presented yet, by number."""
        self.is_draining = False

    @property
    def num_awaiting_kv(self) -> int:
        return len(self._by_ticket)

    @property
    def num_host_blocks(self) -> int:
        """Blocks of KV that may arrive before they have blocks; 0 while a sequence waits so."""
        swap = self._state.swap
        return swap.num_free_blocks if self._late and swap.is_empty else 0

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    @property
    def num_queued_tokens(self) -> int:
        return sum(queued.command.spec.num_tokens for queued in self._queued.values())

    @property
    def local_prefill_threshold(self) -> int:
        """Maximum missing tokens to compute here, under the current load, instead of awaiting a
        ticket."""
        return self._costs.local_prefill_threshold(self._state.num_decoding)

    # Opened sequences

    def open(self, command: Open, policy: Policy) -> None:
        key = command.stream, command.handle
        error = self._handoffs.take_early_end(key) or self._refusal(command)
        if error:
            self._turn_away(command, failed(error))
            return
        queued = _Queued(key, command, self._state.clock())
        if policy.queues_prompts and command.source is KvSource.LOCAL:
            self._queued[key] = queued
        elif why := self._no_room(command) or self._admit(queued):
            self._turn_away(command, why)

    def admit_queued(self) -> bool:
        """Give blocks to queued prompts, best rank first, until blocks or batch places run out.
        Return whether any was admitted."""
        num_before = len(self._queued)
        for queued in sorted(self._queued.values(), key=_rank_of):
            if self._no_room(queued.command):
                break
            # A lookup of a long prompt takes longer than a step.
            wanted = queued.key, self._state.pool.room, self._state.num_growing_places
            if wanted == self._without_room:
                break
            if self._admit(queued):
                # Finding no room gives back the blocks that were found.
                self._without_room = queued.key, self._state.pool.room, wanted[2]
                break
            del self._queued[queued.key]
        return len(self._queued) < num_before

    def cancel_queued(self, key: Hashable) -> bool:
        """Remove a prompt from the queue. Return whether it was queued."""
        queued = self._queued.pop(key, None)
        if queued and queued.command.destination:
            self._handoffs.reject(key, Cancelled("the gateway gave the prompt up"))
        return queued is not None

    def cancel_queued_of(self, stream: int, known_handles: Iterable[int] = ()) -> int:
        """Remove a stream's prompts from the queue, except `known_handles`. Return their number."""
        known = set(known_handles)
        keys = [
            key
            for key, queued in self._queued.items()
            if queued.command.stream == stream and known.isdisjoint(_handles_of(queued.command))
        ]
        return sum(map(self.cancel_queued, keys))

    def fail_queued(self, key: Hashable, error: BatonError) -> bool:
        """Fail a prompt after its handoff failed. Return whether it was queued."""
        queued = self._queued.pop(key, None)
        if queued:
            self._state.emit_at(queued.command.stream, queued.command.handle, failed(error))
        return queued is not None

    def _turn_away(self, command: Open, answer: Failed | Deferred) -> None:
        self._state.emit_at(command.stream, command.handle, answer)
        if command.destination:
            self._handoffs.reject(
                (command.stream, command.handle), Cancelled("the prompt was not taken")
            )

    def _refusal(self, command: Open) -> BatonError | None:
        """The error if the sequence can never run here, even in an empty worker; else None."""
        if self.is_draining:
            return Draining("this worker takes no more sequences")
        spec, state = command.spec, self._state
        if (error := refusal(spec, state.spec)) or command.destination:
            return error
        num_wide = spec.width
        most = min(self._limits.max_num_seqs, self._limits.max_num_batched_tokens)
        if num_wide > most:
            return InvalidRequest(
                f"sampling: {num_wide} choices or beams are more than this worker runs at once; "
                f"ask for at most {most}"
            )
        if spec.sampling.beam is None:
            return None
        longest = min(spec.sampling.max_tokens, state.spec.max_model_len - spec.num_tokens)
        # Per beam: the blocks that it writes, and copies of the shared blocks on a fork.
        num_own = state.pool.num_blocks_for(longest) + state.pool.num_copied_blocks
        num_blocks = spec.num_tokens // state.pool.block_size + num_wide * num_own
        if num_blocks <= state.pool.num_blocks:
            return None
        return InvalidRequest(
            f"sampling.beam_search: {num_wide} beams of {longest} tokens may take {num_blocks} "
            f"blocks of {state.pool.num_blocks}; lower max_tokens or the width"
        )

    def _no_room(self, command: Open) -> Deferred | None:
        """Why a sequence cannot be admitted now, for reasons other than blocks; else None."""
        state = self._state
        num_wide = 1 if command.destination else command.spec.width
        if state.num_places + num_wide > self._limits.max_num_seqs:
            most = self._limits.max_num_seqs
            return Deferred(f"{state.num_places} of {most} places are taken")
        if not all(lets_pass(state, each) for each in waiting(state)):
            return Deferred("sequences that were swapped out come back first")
        return None

    def _admit(self, queued: _Queued) -> Deferred | None:
        """Admit a sequence with its blocks and return None, or return why it is deferred."""
        state, command = self._state, queued.command
        lease = self._lease(command)
        if isinstance(lease, Deferred):
            return lease
        sampling = command.spec.sampling
        sequence = WorkerSequence(
            command.stream,
            command.handle,
            command.spec,
            lease,
            Stage.RUNNING,
            lease.num_cached_tokens,
            destination=command.destination,
            is_sending=command.destination is not None,
            matcher_future=self._matchers.submit(sampling) if sampling.grammar else None,
        )
        state.put(sequence)
        if self._late and command.source is KvSource.PREFILL:
            self._late.reserve(sequence)
        for overtaken in waiting(state):
            overtaken.num_overtaken += 1
        # The threshold may fall during a fetch, but a prompt that was to be computed here has no
        # slots for a ticket.
        is_here = self._is_computed_here(command, lease.num_cached_tokens)
        begin = partial(self._begin, sequence, queued, is_here=is_here)
        tiers = self._tiers
        # KV from a tier has no log probabilities of the prompt.
        is_scored = wants_prompt_logprobs(command.spec)
        if tiers is None or is_scored or not tiers.fetch(sequence, state.num_spare_blocks, begin):
            begin()
        return None

    def _begin(self, sequence: WorkerSequence, queued: _Queued, *, is_here: bool) -> None:
        """Compute or await the tokens that are not cached. is_here: whether they are computed here
        in any case."""
        state, command, num_cached = self._state, queued.command, sequence.num_computed_tokens
        if not is_here and not self._is_computed_here(command, num_cached):
            self._offer(sequence, command.source)
            return
        state.swap.drop(sequence.key)
        if command.source is not KvSource.HANDOFF:
            sequence.prefill = LocalPrefillProgress(queued.arrived_s, state.clock(), num_cached)
        state.emit(sequence, LocalPrefill(num_cached))
        if sequence.destination:
            self._fetch_prefix(sequence, sequence.destination)
            layers = range(state.spec.layout.num_layers)
            self._handoffs.send_computed(sequence, range(num_cached), layers)

    def _lease(self, command: Open) -> BlockLease | Deferred:
        state, spec = self._state, command.spec
        shares_prefixes = state.spec.shares_prefixes(len(spec.prompt_token_ids))
        is_scored_here = wants_prompt_logprobs(spec) and command.source is KvSource.LOCAL
        num_tokens = spec.num_tokens + (command.destination is None)
        if self._late:
            num_tokens = self._late.num_first_tokens(command, num_tokens)
        groups = state.spec.groups
        num_sent = spec.num_tokens - (command.source is KvSource.HANDOFF)
        is_local = command.source is KvSource.LOCAL
        lease = state.pool.lease(
            spec.prefix_key,
            spec.token_ids,
            num_tokens if groups.keeps_all_blocks else 0,
            shares_prefixes=shares_prefixes and not is_scored_here,
            # A cached prefix counts only if it reaches the first token held by windowed groups.
            min_prefix_tokens=0 if is_local else groups.held_start(num_sent),
        )
        if lease is None:
            return Deferred("no room for the prompt's blocks")
        # A ticket's sender omits tokens that windowed groups no longer need; see Send.
        first_token = 0 if is_local else groups.whole_start(num_sent)
        if not self._reserve(lease, command, first_token, num_tokens):
            lease.release()
            return Deferred("no room for the blocks of the prompt's window")
        num_growing = state.num_growing_places
        if not command.destination:
            num_growing += spec.width - 1
        if state.pool.num_available < num_growing:
            lease.release()  # running sequences must be able to grow first
            return Deferred("the sequences that run need the blocks that are left")
        return lease

    def _reserve(self, lease: BlockLease, command: Open, first_token: int, num_tokens: int) -> bool:
        """Reserve blocks and slots beyond the lease's; return False if there are too few. For a
        ticket: from `first_token` on. For a local prompt with groups that release blocks: the most
        that is held while its chunks are computed, and the tokens to fetch; its state slots are
        taken as it proceeds, see LayerGroups.max_slots."""
        groups = self._state.spec.groups
        if not self._is_computed_here(command, lease.num_cached_tokens):
            holds_prefix = lease.num_cached_tokens and not groups.keeps_all_blocks
            return lease.reserve(0 if holds_prefix else first_token, num_tokens)
        if groups.keeps_all_blocks:
            return True
        most = lease.held_start + groups.reach_tokens + groups.layout.block_size
        end = max(most, lease.num_cached_tokens) + self._limits.max_num_batched_tokens
        if command.destination:
            end = max(end, command.destination.num_held_tokens)
        return lease.reserve(0, min(num_tokens, end))

    def _is_computed_here(self, command: Open, num_cached_tokens: int) -> bool:
        """Whether the missing tokens are computed here instead of awaited."""
        num_missing = command.spec.num_tokens - num_cached_tokens
        match command.source:
            case KvSource.LOCAL:
                return True
            case KvSource.HANDOFF:
                return num_missing == 1
            case KvSource.PREFILL:
                is_short = num_missing <= self.local_prefill_threshold
                return is_short and not wants_prompt_logprobs(command.spec)

    def _fetch_prefix(self, sequence: WorkerSequence, destination: Destination) -> None:
        """Fetch the tokens that the destination holds and this worker lacks, if that is cheaper
        than computing them."""
        spec, num_computed = sequence.spec, sequence.num_computed_tokens
        num_held = min(destination.num_held_tokens, spec.num_tokens - 1)
        num_lacking = num_held - num_computed
        if num_lacking <= 0 or wants_prompt_logprobs(spec):
            return
        if not self._costs.is_fetch_cheaper(num_lacking):
            return
        groups, lease = self._state.spec.groups, sequence.lease
        if groups.keeps_all_blocks and not lease.reserve(groups.whole_start(num_held), num_held):
            return
        block_ids = tuple(sequence.lease.block_ids)
        offered = self._tickets.offer(
            *(spec, block_ids, num_computed, num_held, FETCH_LEASE_S),
            held_start=sequence.lease.held_start,
        )
        sequence.stage = Stage.FETCHING
        sequence.ticket_id = offered.ticket_id
        sequence.offered_s = self._state.clock()
        self._fetching[offered.ticket_id] = sequence
        self._announce(offered)

    def _offer(self, sequence: WorkerSequence, source: KvSource) -> None:
        spec = sequence.spec
        # The last token of a migrated sequence has no KV yet; the next step computes it here.
        num_tokens = spec.num_tokens - (source is KvSource.HANDOFF)
        num_cached = sequence.num_computed_tokens
        offered = self._late.offer(sequence, num_tokens) if self._late else None
        if offered is None:
            block_ids = tuple(sequence.lease.block_ids)
            offered = self._tickets.offer(
                *(spec, block_ids, num_cached, num_tokens), held_start=sequence.lease.held_start
            )
        sequence.stage = Stage.AWAITING_KV
        sequence.ticket_id = offered.ticket_id
        sequence.offered_s = self._state.clock()
        self._by_ticket[offered.ticket_id] = sequence
        self._announce(offered)

    def _announce(self, offered: OfferedTicket) -> None:
        """Give a ticket to its sender, now or once it can be presented."""
        if not offered.is_known:
            self._unannounced[offered.ticket_id] = offered.data
        elif sequence := self._fetching.get(offered.ticket_id):
            self._handoffs.fetch(sequence, offered.data)
        else:
            sequence = self._by_ticket[offered.ticket_id]
            num_cached = sequence.num_computed_tokens
            self._state.emit(sequence, Offered(offered.data, num_cached, offered.ticket_id))

    def grow_arriving(self) -> None:
        """Give blocks to sequences whose KV arrives."""
        if self._late and self._by_ticket:
            self._late.grow(self._by_ticket.values())

    # Ticket events

    def on_offered(self, ticket_id: int) -> None:
        """A ticket can be presented, unless it has ended."""
        if data := self._unannounced.pop(ticket_id, None):
            self._announce(OfferedTicket(ticket_id, data))

    def awaiting(self, ticket_id: int) -> WorkerSequence | None:
        """The sequence that awaits the ticket's KV; None once the ticket has ended."""
        return self._by_ticket.get(ticket_id)

    def on_committed(self, committed: TicketCommitted) -> WorkerSequence | None:
        """Run the sequence: all its KV has arrived. Return it; None if it was cancelled, or for a
        fetched prefix."""
        sequence = self._release_ticket(committed.ticket_id)
        if sequence.stage is Stage.CLOSING:
            self._state.leave(sequence)
            return None
        num_missing = committed.num_tokens - sequence.num_computed_tokens
        waited_s = self._state.clock() - sequence.offered_s
        is_prefix = sequence.stage is Stage.FETCHING
        sequence.num_computed_tokens = committed.num_tokens
        sequence.lease.received(committed.whole_start)
        if self._late is None or self._late.on_committed(sequence, committed):
            sequence.stage = Stage.RUNNING
            sequence.lease.index(sequence.token_ids, committed.num_tokens)
            sequence.lease.slide(sequence.token_ids, committed.num_tokens)
        if is_prefix:
            self._costs.fetch.observe(num_missing, waited_s)
            if sequence.prefill:
                sequence.prefill.num_fetched_tokens = num_missing
            return None
        if committed.first_tokens:  # a complete prefill, not a migration
            self._costs.handoff.observe(num_missing, waited_s)
        event = Committed(committed.transfer_exposed_ms, committed.num_bytes, committed.checksum)
        self._state.emit(sequence, event)
        return sequence

    def on_aborted(self, aborted: TicketAborted) -> None:
        """A ticket was aborted: fail its sequence, or compute the prefix that was to be fetched."""
        sequence = self._release_ticket(aborted.ticket_id)
        if sequence.stage is Stage.FETCHING:
            sequence.stage = Stage.RUNNING
            return
        if sequence.stage is not Stage.CLOSING:
            event = Failed(aborted.reason, aborted.message, is_retriable=True)
            self._state.emit(sequence, event)
        self._state.leave(sequence)

    def _release_ticket(self, ticket_id: int) -> WorkerSequence:
        """Forget an ended ticket. Its sequence is now the only owner of the blocks."""
        self._tickets.release(ticket_id)
        self._unannounced.pop(ticket_id, None)
        sequence = self._by_ticket.pop(ticket_id, None) or self._fetching.pop(ticket_id)
        sequence.ticket_id = None
        return sequence


def _rank_of(queued: _Queued) -> Rank:
    return across_accounts(queued.command.spec.rank)


def _handles_of(command: Open) -> range:
    return range(command.handle, command.handle + command.spec.num_choices)
