"""Preemption: takes the blocks of low-ranked sequences, which are swapped to host memory or
released for another placement.

A swapped sequence gives its blocks up, or runs again, once the swap space's thread has copied its
KV (`on_copied`). Meanwhile the scheduler counts blocks that are being given up as available
(`num_leaving_blocks`), so that it preempts no further sequences for the same need.
"""

from __future__ import annotations

from baton.errors import Cancelled
from baton.events import Preempted
from worker_core.beam_group import BeamGroup
from worker_core.costs import Costs
from worker_core.handoff import Handoffs
from worker_core.late_blocks import lets_pass
from worker_core.sequence import Stage, WorkerSequence
from worker_core.state import CoreState, SequenceGroup
from worker_core.swap import SwapDone


class Preemption:
    """Runs between steps, with no launch in flight."""

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
        state.swap.copy_out(group.key, group.lease.block_ids, group.num_computed_tokens)
        group.lease.index(group.token_ids, group.num_computed_tokens)
        group.stage, group.is_copying = Stage.COPYING, True

    @property
    def num_leaving_blocks(self) -> int:
        """Blocks that become available when the copies under way have ended."""
        state = self._state
        copying = state.in_stage(Stage.COPYING)
        return sum(each.num_exclusive_blocks for each in copying if state.swap.is_leaving(each.key))

    def on_copied(self, done: SwapDone) -> None:
        """A copy has ended: release the blocks, or run the sequence again."""
        state = self._state
        sequence = state.groups.get(done.key)
        if not isinstance(sequence, WorkerSequence):
            return
        sequence.is_copying = False
        if sequence.stage is Stage.CLOSING:
            state.leave(sequence)
        elif done.is_out:
            if done.num_bytes:
                self._costs.copy.observe(done.num_bytes, done.seconds)
            sequence.lease.release()
            sequence.stage = Stage.SWAPPED
        else:
            state.swap.drop(done.key)
            sequence.lease.index(sequence.token_ids, sequence.num_computed_tokens)
            sequence.stage = Stage.RUNNING

    def bring_back(self) -> bool:
        """Begin to swap sequences in, best rank first, while all running ones keep room to grow.

        Return whether any was begun.
        """
        state = self._state
        if state.swap.is_empty:
            return False
        swapped = [m for m in state.in_stage(Stage.SWAPPED) if isinstance(m, WorkerSequence)]
        num_growing = len(state.in_stage(Stage.RUNNING)) + len(state.in_stage(Stage.COPYING))
        passed: list[WorkerSequence] = []
        num_back = 0
        for sequence in swapped:
            num_own = state.spec.groups.num_held_blocks(len(sequence.token_ids))
            num_needed = num_own + num_growing + num_back
            if num_needed <= state.pool.num_available and self._bring_back(sequence):
                num_back += 1
                for each in passed:
                    each.num_overtaken += 1
            elif lets_pass(state, sequence):
                passed.append(sequence)
            else:
                break
        return num_back > 0

    def _is_swapped_rather(self, sequence: WorkerSequence) -> bool:
        swap, num_tokens = self._state.swap, sequence.num_computed_tokens
        if sequence.is_busy or sequence.is_prefilling or not swap.has_room_for(num_tokens):
            return False
        return self._costs.is_swap_cheaper(swap.num_bytes_of(num_tokens), num_tokens)

    def _bring_back(self, sequence: WorkerSequence) -> bool:
        state, num_tokens = self._state, len(sequence.token_ids)
        groups = state.spec.groups
        # Groups with a window kept only the tokens from here on; see SwapSpace.
        first_token = groups.whole_start(sequence.num_computed_tokens)
        arrived_start = state.swap.arrived_start(sequence.key)
        lease = state.pool.lease(
            sequence.spec.prefix_key,
            # Chunks that have arrived are written to blocks of its own.
            sequence.token_ids[: arrived_start and arrived_start + 1],
            num_tokens if groups.keeps_all_blocks or not first_token else 0,
            shares_prefixes=state.spec.shares_prefixes(sequence.num_prompt_tokens),
        )
        if lease is None:
            return False
        if not lease.reserve(first_token, num_tokens):
            lease.release()
            return False
        state.swap.copy_in(sequence.key, lease.block_ids, lease.num_cached_tokens)
        lease.received(max(first_token, sequence.lease.whole_start))
        sequence.lease = lease
        sequence.stage, sequence.is_copying = Stage.COPYING, True
        return True
