"""The simulated mix of a model with states finds what it is for: each fault that is seeded here
into the code fails one of its first seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.kv.groups.state import STATE, StateSlots
from engine.kv.lease import BlockLease
from engine.kv.range import KvRange
from engine.kv.tensors.state_memory import StateMemory, StatePlace
from engine.oracle import OracleLayers
from kv_transfer.ticket import Coverage
from tests.sim.test_mix import run_seed
from worker_core.handoff import Handoffs
from worker_core.state import CoreState

Mutate = Callable[[pytest.MonkeyPatch], None]

SEEDS = range(6)


def a_slot_is_not_reset(patch: pytest.MonkeyPatch) -> None:
    """A sequence begins from what the one before it has left."""
    begin_step = StateMemory.begin_step

    def begin(self: StateMemory, block_table: Any, start: int) -> Any:
        before, after = begin_step(self, block_table, start)
        stale = StatePlace(after.slot, 1 - after.at)
        return before or (stale if self.data[stale].any() else None), after

    patch.setattr(StateMemory, "begin_step", begin)


def a_slot_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateSlots, "on_freed", lambda *_: None)


def an_aborted_sequence_keeps_its_slot(patch: pytest.MonkeyPatch) -> None:
    """A sequence that leaves before its end keeps its slot."""
    leave, give_back = CoreState.leave, StateSlots.on_freed

    def leave_with_slot(self: CoreState, group: Any) -> None:
        if group.num_missing_tokens > 1:
            patch.setattr(StateSlots, "on_freed", lambda *_: None)
        leave(self, group)
        patch.setattr(StateSlots, "on_freed", give_back)

    patch.setattr(CoreState, "leave", leave_with_slot)


def states_are_sent_before_the_last_chunk(patch: pytest.MonkeyPatch) -> None:
    """Whatever they are after."""
    send_computed, states = Handoffs.send_computed, Handoffs._records

    def send(self: Handoffs, sequence: Any, tokens: range, *rest: Any) -> None:
        is_first = tokens.start == 0 < tokens.stop and rest[0].start == 0
        if is_first and sequence.destination and sequence.prefill:
            for each in states(self, sequence.key, sequence.lease, sequence.spec.num_tokens):
                self._sender.submit(each)
        send_computed(self, sequence, tokens, *rest)

    def later(self: Handoffs, key: Any, lease: Any, num_tokens: int) -> Any:
        return () if self._state.groups[key].destination else states(self, key, lease, num_tokens)

    patch.setattr(Handoffs, "send_computed", send)
    patch.setattr(Handoffs, "_records", later)
    patch.setattr(StateMemory, "_place_of", lambda _self, slot, _: slot % 2)


def states_are_not_sent(patch: pytest.MonkeyPatch) -> None:
    """And nobody asks whether they have come."""
    whole_start = Coverage.whole_start

    def covered(self: Coverage, *tokens: int) -> Any:
        self._runs[STATE] = []
        return whole_start(self, *tokens)

    patch.setattr(Handoffs, "_records", lambda *_: ())
    patch.setattr(Coverage, "whole_start", covered)


def a_half_of_the_states_is_written(patch: pytest.MonkeyPatch) -> None:
    unpack = StateMemory.unpack

    def first_layers(self: StateMemory, block_ids: Any, piece: KvRange, data: memoryview) -> None:
        if piece.first_layer == 0:
            unpack(self, block_ids, piece, data)

    patch.setattr(StateMemory, "unpack", first_layers)


def a_fork_copies_no_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateMemory, "copy", lambda *_: None)


def choices_share_a_slot(patch: pytest.MonkeyPatch) -> None:
    shared_indices = BlockLease.shared_indices

    def without_first(self: BlockLease, start: int, end: int) -> list[int]:
        size = self._blocks.size
        return [index for index in shared_indices(self, start, end) if index >= start // size]

    patch.setattr(BlockLease, "shared_indices", without_first)


def a_step_writes_the_states_it_has_read(patch: pytest.MonkeyPatch) -> None:
    """So that none may be run again."""
    begin_step = StateMemory.begin_step

    def begin(self: StateMemory, block_table: Any, start: int) -> Any:
        before, after = begin_step(self, block_table, start)
        if before:
            self.data[after], self._num_tokens[after] = self.data[before], start
        return before, before or after

    patch.setattr(StateMemory, "begin_step", begin)


def states_of_another_are_sent(patch: pytest.MonkeyPatch) -> None:
    pack = StateMemory.pack

    def pack_next(self: StateMemory, block_ids: Any, piece: KvRange, out: memoryview) -> None:
        pack(self, block_ids, piece, out)
        slot = (self._slot_of(block_ids) + 1) % self.slots.num_slots
        if piece.group == STATE and self._num_tokens[slot].max() > 0:
            layers = slice(piece.first_layer, piece.end_layer)
            out[:] = self.data[slot, 0, layers].tobytes()

    patch.setattr(StateMemory, "pack", pack_next)


def run_seeds() -> None:
    for seed in SEEDS:
        run_seed(seed, OracleLayers(has_states=True))


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    "mutate",
    [
        a_slot_is_not_reset,
        a_slot_is_not_given_back,
        an_aborted_sequence_keeps_its_slot,
        states_are_sent_before_the_last_chunk,
        states_are_not_sent,
        a_half_of_the_states_is_written,
        a_fork_copies_no_state,
        choices_share_a_slot,
        a_step_writes_the_states_it_has_read,
        states_of_another_are_sent,
    ],
)
def test_a_seeded_fault_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_seeds()
