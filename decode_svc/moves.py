"""Moving sequences away: to another decode worker by a handoff, or to host memory and back."""

from __future__ import annotations

from collections.abc import Callable

from baton.cache.pool import BlockLease
from baton.engine.kv_range import KvRange
from baton.errors import HandoffFailed, InvalidRequest
from baton.events import HandedOff, HandOffFailed, Paused, Preempted
from decode_svc.beam_group import BeamGroup
from decode_svc.commands import HandOff, Pause, Resume
from decode_svc.costs import Costs
from decode_svc.sequence import DecodeSequence, Stage
from decode_svc.state import DecodeState, Member
from kv_transfer.kv_sender import KvSender
from kv_transfer.sender import SendDone
from kv_transfer.ticket import LendAsked


class Moves:
    """To other decode workers, when the gateway says so. What cannot be moved stays as it is, or paused."""

    def __init__(self, state: DecodeState, sender: KvSender, clock: Callable[[], float]) -> None:
        """clock: the sender's."""
        self._state = state
        self._sender = sender
        self._clock = clock
        self._moving: dict[str, DecodeSequence] = {}

    def heartbeat(self) -> None:
        self._sender.heartbeat()

    def obey(self, command: Pause | HandOff | Resume) -> None:
        match command:
            case Pause():
                self._pause(command)
            case HandOff():
                self._hand_off(command)
            case Resume():
                self._resume(command)

    def _pause(self, command: Pause) -> None:
        member = self._state.find(command.stream, command.handle)
        if member is None or member.stage in (Stage.PAUSED, Stage.MOVING, Stage.ABANDONED):
            return
        is_movable = isinstance(member, DecodeSequence) and not member.is_prefilling
        if member.stage is not Stage.RUNNING or not is_movable:
            why = HandOffFailed(HandoffFailed.reason, "the sequence does not decode now")
            self._state.emit(member, why)
            return
        member.stage = Stage.PAUSED
        self._state.emit(member, Paused())

    def _resume(self, command: Resume) -> None:
        member = self._state.find(command.stream, command.handle)
        if member and member.stage is Stage.PAUSED:
            member.stage = Stage.RUNNING

    def _hand_off(self, command: HandOff) -> None:
        sequence = self._state.find(command.stream, command.handle)
        if not isinstance(sequence, DecodeSequence) or sequence.stage is not Stage.PAUSED:
            return
        key, num_tokens = sequence.key, sequence.num_computed_tokens
        try:
            self._sender.begin(key, command.ticket)
        except InvalidRequest as error:
            self._state.emit(sequence, HandOffFailed(error.reason, error.message))
            return
        sequence.stage = Stage.MOVING
        self._moving[key] = sequence
        num_layers = self._state.spec.layout.num_layers
        _send_whole(self._sender, key, sequence.lease, num_tokens, num_layers, self._clock())

    def abandon(self, sequence: Member) -> None:
        """Nobody wants a moving sequence any more: its blocks wait for the sender's last word."""
        sequence.stage = Stage.ABANDONED
        self._sender.abort(sequence.key, "CANCELLED", "the gateway gave the request up")

    def finish(self, done: SendDone) -> None:
        """The sender has had its last word."""
        sequence = self._moving.pop(done.key)
        if sequence.stage is Stage.ABANDONED:
            self._state.leave(sequence)
        elif done.error:
            sequence.stage = Stage.PAUSED
            self._state.emit(sequence, HandOffFailed(done.error.reason, done.error.message))
        else:
            self._state.emit(sequence, HandedOff())
            self._state.leave(sequence)


class Lending:
    """To prefill workers that lack what a sequence's ticket says is here: they get a copy of it."""

    def __init__(self, state: DecodeState, sender: KvSender, clock: Callable[[], float]) -> None:
        """clock: the sender's."""
        self._state = state
        self._sender = sender
        self._clock = clock

    def lend(self, sequence: DecodeSequence, ask: LendAsked) -> None:
        """Send what is here of a sequence that awaits the rest of its KV. Its blocks stay ours until `finish`."""
        state, num_tokens = self._state, sequence.num_computed_tokens
        key = f"loan {ask.ticket_id}"
        if key in state.loans or not num_tokens:
            return
        try:
            self._sender.begin(key, ask.lend_to)
        except InvalidRequest:
            return  # the borrower's own ticket ends its wait
        state.loans[key] = lease = sequence.lease.fork(num_tokens)
        num_layers = state.spec.layout.num_layers
        _send_whole(self._sender, key, lease, num_tokens, num_layers, self._clock())

    def finish(self, done: SendDone) -> None:
        """The sender has had its last word."""
        self._state.loans.pop(done.key).release()


class Preemption:
    """Takes the blocks of sequences whose turn it is not: they wait in host memory, or are placed anew."""

    def __init__(self, state: DecodeState, costs: Costs, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        self._state = state
        self._costs = costs
        self._clock = clock

    def preempt(self, member: Member) -> None:
        state = self._state
        if isinstance(member, BeamGroup) or not self._is_swapped_rather(member):
            state.emit(member, Preempted())
            state.leave(member)
            return
        begin_s, num_tokens = self._clock(), member.num_computed_tokens
        state.swap.put(member.key, member.lease.block_ids, num_tokens)
        self._costs.observe_copy(state.swap.num_bytes_of(num_tokens), self._clock() - begin_s)
        member.lease.index(member.token_ids, member.num_computed_tokens)
        member.lease.release()
        member.stage = Stage.SWAPPED

    def bring_back(self) -> bool:
        """Give swapped sequences their blocks again, best rank first, while there is room for all that run to grow.

        Whether any came back.
        """
        state = self._state
        if state.swap.is_empty:
            return False
        swapped = [m for m in state.in_stage(Stage.SWAPPED) if isinstance(m, DecodeSequence)]
        num_growing = len(state.in_stage(Stage.RUNNING))
        for num_back, sequence in enumerate(swapped):
            num_needed = state.pool.num_blocks_for(len(sequence.token_ids)) + num_growing + num_back
            if num_needed > state.pool.num_available or not self._bring_back(sequence):
                return num_back > 0
        return bool(swapped)

    def _is_swapped_rather(self, sequence: DecodeSequence) -> bool:
        swap, num_tokens = self._state.swap, sequence.num_computed_tokens
        if sequence.is_prefilling or not swap.has_room_for(num_tokens):
            return False
        return self._costs.is_swap_cheaper(swap.num_bytes_of(num_tokens), num_tokens)

    def _bring_back(self, sequence: DecodeSequence) -> bool:
        lease = self._state.pool.lease(
            sequence.spec.tenant,
            sequence.token_ids,
            len(sequence.token_ids),
            shares_prefixes=self._state.shares_prefixes(sequence.spec),
        )
        if lease is None:
            return False
        self._state.swap.take(sequence.key, lease.block_ids, lease.num_cached_tokens)
        sequence.lease = lease
        sequence.stage = Stage.RUNNING
        return True


def _send_whole(
    sender: KvSender, key: str, lease: BlockLease, num_tokens: int, num_layers: int, now_s: float
) -> None:
    """Send all there is of a handoff that has begun. The receiver knows the tokens: none comes with the commit."""
    sender.send(key, tuple(lease.block_ids), KvRange(0, num_tokens, 0, num_layers))
    sender.commit(key, num_tokens, (), now_s)
