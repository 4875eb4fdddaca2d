"""Taking the blocks of sequences whose turn it is not: they wait in host memory, or are placed
anew."""

from __future__ import annotations

from baton.errors import Cancelled
from baton.events import Preempted
from worker_core.beam_group import BeamGroup
from worker_core.costs import Costs
from worker_core.handoff import Handoffs
from worker_core.sequence import Stage, WorkerSequence
from worker_core.state import CoreState, SequenceGroup


class Preemption:
    """Between steps, with no launch in flight."""

    def __init__(self, state: CoreState, costs: Costs, handoffs: Handoffs) -> None:
        self._state = state
        self._costs = costs
        self._handoffs = handoffs

    def preempt(self, group: SequenceGroup) -> None:
        state = self._state
        if isinstance(group, BeamGroup) or not self._is_swapped_rather(group):
            state.emit(group, Preempted())
            if isinstance(group, WorkerSequence):
                self._handoffs.cancel(group, Cancelled.reason, "others needed the memory")
            state.leave(group)
            return
        begin_s, num_tokens = state.clock(), group.num_computed_tokens
        state.swap.put(group.key, group.lease.block_ids, num_tokens)
        self._costs.copy.observe(state.swap.num_bytes_of(num_tokens), state.clock() - begin_s)
        group.lease.index(group.token_ids, group.num_computed_tokens)
        group.lease.release()
        group.stage = Stage.SWAPPED

    def bring_back(self) -> bool:
        """Give swapped sequences their blocks again, best rank first, while there is room for all
        that run to grow.

        Whether any came back.
        """
        state = self._state
        if state.swap.is_empty:
            return False
        swapped = [m for m in state.in_stage(Stage.SWAPPED) if isinstance(m, WorkerSequence)]
        num_growing = len(state.in_stage(Stage.RUNNING))
        for num_back, sequence in enumerate(swapped):
            num_own = state.spec.groups.num_held_blocks(len(sequence.token_ids))
            num_needed = num_own + num_growing + num_back
            if num_needed > state.pool.num_available or not self._bring_back(sequence):
                return num_back > 0
        return bool(swapped)

    def _is_swapped_rather(self, sequence: WorkerSequence) -> bool:
        swap, num_tokens = self._state.swap, sequence.num_computed_tokens
        if sequence.is_busy or sequence.is_prefilling or not swap.has_room_for(num_tokens):
            return False
        return self._costs.is_swap_cheaper(swap.num_bytes_of(num_tokens), num_tokens)

    def _bring_back(self, sequence: WorkerSequence) -> bool:
        state, num_tokens = self._state, len(sequence.token_ids)
        groups = state.spec.groups
        # Groups that keep fewer than all tokens were kept from there on, see SwapSpace.
        first_token = groups.whole_start(sequence.num_computed_tokens)
        lease = state.pool.lease(
            sequence.spec.prefix_key,
            sequence.token_ids,
            num_tokens if groups.keeps_all_blocks or not first_token else 0,
            shares_prefixes=state.spec.shares_prefixes(sequence.num_prompt_tokens),
        )
        if lease is None:
            return False
        if not lease.reserve(first_token, num_tokens):
            lease.release()
            return False
        state.swap.take(sequence.key, lease.block_ids, lease.num_cached_tokens)
        lease.received(max(first_token, sequence.lease.whole_start))
        sequence.lease = lease
        sequence.stage = Stage.RUNNING
        return True
