"""Late blocks: a prompt whose KV comes by a ticket gets its blocks while the KV arrives.

    open     all blocks if half of the free ones are enough; else blocks for the next tokens only,
             and room for all of its KV in host memory
    grow     each step, ahead of what has arrived; while no sequence waits in host memory
    arrived  chunks that came before their blocks are in host memory: the sequence takes the missing
             blocks and the chunks are copied in, or all of its KV goes to host memory and it comes
             back like a preempted one

Nothing waits while it holds blocks: a ticket always ends, because its chunks need no blocks, and
after that a sequence has all of its blocks or none. So two prompts that need each other's blocks
both arrive, and the better-ranked one runs first. A sequence that arrived and waits lets
MAX_OVERTAKING others pass that fit now, and then none.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.types import KvSource
from engine.kv.interface import KvPool
from engine.kv.range import ALL
from kv_transfer.ticket import OfferedTicket, TicketCommitted
from kv_transfer.ticket_table import LateTickets
from worker_core.commands import Open
from worker_core.sequence import Stage, WorkerSequence
from worker_core.state import CoreState

#: Chunks of a prompt, each a step's tokens at most, that have blocks before they arrive.
LATE_CHUNKS = 2
#: Sequences that may take blocks before one that has arrived and waits for more.
MAX_OVERTAKING = 8


def supports_late_blocks(kv: KvPool) -> bool:
    """Whether KV may arrive in host memory first: a pool there, all of whose layers keep all
    tokens."""
    groups, memory = kv.groups, kv.memory_of(ALL)
    is_plain = groups.keeps_all_blocks and not groups.has_partial and not groups.cannot_rewind
    return is_plain and memory is not None and memory.has_block_views


class LateBlocks:
    """Used by the engine loop's thread."""

    def __init__(self, state: CoreState, tickets: LateTickets, ahead_tokens: int) -> None:
        """ahead_tokens: that have blocks before they arrive."""
        self._state = state
        self._tickets = tickets
        self._ahead_tokens = ahead_tokens

    def num_first_tokens(self, command: Open, num_tokens: int) -> int:
        """Tokens, of num_tokens, to hold blocks for when a sequence is opened: all of them if half
        of the free blocks are enough."""
        state, spec = self._state, command.spec
        is_late = command.source is KvSource.PREFILL and spec.is_single
        if not is_late or not state.swap.has_room_for(spec.num_tokens):
            return num_tokens
        num_free_tokens = max(0, state.num_spare_blocks - 1) * state.pool.block_size
        num_first = min(num_tokens, self._ahead_tokens, num_free_tokens)
        # With fewer blocks than that it may wait for long: one at a time.
        is_short = num_first == num_free_tokens and not state.swap.is_empty
        return num_tokens if is_short or 2 * num_tokens <= num_free_tokens else num_first

    def reserve(self, sequence: WorkerSequence) -> None:
        """Reserve room in host memory for the KV of a sequence that has too few blocks."""
        if sequence.lease.num_tokens < sequence.spec.num_tokens:
            self._state.swap.reserve(sequence.key, sequence.spec.num_tokens)

    def offer(self, sequence: WorkerSequence, num_tokens: int) -> OfferedTicket | None:
        """Offer a ticket for a sequence that has too few blocks; None if it has enough."""
        if num_tokens <= sequence.lease.num_tokens:
            return None
        table = tuple(sequence.lease.block_ids)
        num_cached = sequence.num_computed_tokens
        return self._tickets.offer(sequence.spec, table, num_cached, num_tokens, is_late=True)

    def grow(self, arriving: Iterable[WorkerSequence]) -> None:
        """Give blocks to sequences whose KV arrives, so that it need not be parked."""
        state = self._state
        if not state.swap.is_empty:
            return
        lacking = [each for each in arriving if each.lease.num_tokens < each.spec.num_tokens]
        for sequence in sorted(lacking, key=lambda each: each.rank):
            lease, num_tokens = sequence.lease, sequence.spec.num_tokens
            if sequence.ticket_id is None:
                continue
            arrived = max(self._tickets.arrived_end(sequence.ticket_id), lease.num_cached_tokens)
            before, num_free = lease.num_tokens, state.num_spare_blocks
            if 2 * (num_tokens - before) <= num_free * state.pool.block_size:
                lease.extend(num_tokens, num_free)
            elif arrived + self._ahead_tokens // 2 >= before:
                lease.extend(min(num_tokens, arrived + self._ahead_tokens), num_free)
            if lease.num_tokens > before:
                self._tickets.extend(sequence.ticket_id, tuple(lease.block_ids))

    def on_committed(self, sequence: WorkerSequence, committed: TicketCommitted) -> bool:
        """Place the KV of a sequence that has arrived. Return whether it is in its blocks; if not,
        the sequence waits, and its blocks are not indexed."""
        state, lease = self._state, sequence.lease
        if not committed.parked:
            state.swap.drop(sequence.key)
            return True
        arrived_start = min(chunk.first_token for chunk in committed.parked)
        lease.index(sequence.token_ids, min(arrived_start, committed.num_tokens))
        state.swap.arrive(sequence.key, committed.parked)
        num_missing = state.pool.num_blocks_for(committed.num_tokens) - len(lease.block_ids)
        if num_missing <= state.num_spare_blocks:
            lease.extend(committed.num_tokens, state.num_spare_blocks)
            state.swap.copy_in(sequence.key, lease.block_ids, lease.num_cached_tokens)
        else:
            num_held = min(committed.num_tokens, lease.num_tokens)
            state.swap.copy_out(sequence.key, lease.block_ids, num_held)
        sequence.stage, sequence.is_copying = Stage.COPYING, True
        return False


def waiting(state: CoreState) -> list[WorkerSequence]:
    """Sequences with their KV in host memory, or on its way there."""
    if state.swap.is_empty:
        return []
    groups = state.in_stage(Stage.SWAPPED) + state.in_stage(Stage.COPYING)
    return [
        each
        for each in groups
        if isinstance(each, WorkerSequence) and state.swap.is_leaving(each.key)
    ]


def lets_pass(state: CoreState, sequence: WorkerSequence) -> bool:
    """Whether others may take blocks before a sequence that waits in host memory."""
    has_arrived = state.swap.arrived_start(sequence.key) is not None
    return has_arrived and sequence.num_overtaken < MAX_OVERTAKING
