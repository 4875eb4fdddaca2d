"""Handoffs: sends a sequence's KV to the owner of a ticket. One mechanism with three callers.

    with a destination   KV is sent while it is computed, chunk by chunk, and within the last
                         chunk by layer groups, each as soon as its computation is launched; then
                         the states after the last token, if the model has any. The commit
                         carries the first tokens
    hand_off             a paused sequence's KV is sent as a whole: drain, balance, late handoff
    serve_prefix         a copy of a sequence's KV is sent to a worker that computes the rest of
                         the prompt

Each starts with a ticket, which the KV sender stores by key, and ends with one SendDone. Until then
the sender may read the blocks.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import groupby
from operator import itemgetter

from baton.commands import HandOff, Pause, Resume
from baton.errors import (
    BatonError,
    EngineFault,
    HandoffFailed,
    InvalidRequest,
    RetriableError,
)
from baton.events import HandedOff, NotHandedOff, Paused
from baton.types import Sample
from engine.kv.lease import BlockLease
from engine.kv.range import KvRange
from kv_transfer.send_connection import Cancel, FetchPrefix, Finish, Send, SendDone
from kv_transfer.sender import KvSender
from kv_transfer.ticket import PrefixRequested
from worker_core.commands import StreamCommand
from worker_core.sequence import Stage, WorkerSequence
from worker_core.state import CoreState, SequenceGroup


class Handoffs:
    """Handoffs in progress. Owns the blocks of prefixes being served."""

    def __init__(self, state: CoreState, sender: KvSender) -> None:
        """sender: must be on the clock of `state`."""
        self._state = state
        self._sender = sender
        self._groups = state.spec.groups
        self._rejected: set[Hashable] = set()
        """Keys of sequences that never had blocks here, with SendDone outstanding."""
        self._early_ends: dict[Hashable, SendDone] = {}
        """SendDone of sequences that are not opened yet: a ticket is presented before its
        sequence."""

    @property
    def num_rejected(self) -> int:
        return len(self._rejected)

    def heartbeat(self) -> None:
        """Extend the leases of tickets while the engine loop is alive."""
        self._sender.heartbeat()

    # With a destination

    def take_early_end(self, key: Hashable) -> BatonError | None:
        """The error of a handoff that failed before its sequence was opened; else None."""
        early = self._early_ends.get(key)
        return for_gateway(early.error) if early and early.error else None

    def reject(self, key: Hashable, error: BatonError) -> None:
        """Cancel the handoff of a sequence that was not admitted."""
        if self._early_ends.pop(key, None) is None:
            self._rejected.add(key)
            self._sender.submit(Cancel(key, error.reason, error.message))

    def fetch(self, sequence: WorkerSequence, ticket: bytes) -> None:
        """Ask the destination to send its prefix to `ticket`, a ticket of this worker."""
        self._sender.submit(FetchPrefix(sequence.key, ticket))

    def send_computed(
        self, sequence: WorkerSequence, tokens: range, layers: range, mark: object = None
    ) -> None:
        """Send the KV of these tokens and layers that the destination does not hold and was not
        sent. It is final once `mark` is done, or now without a mark."""
        if sequence.destination is None or sequence.prefill is None:
            return
        sent_ends = sequence.prefill.sent_ends
        first = max(tokens.start, sequence.destination.num_held_tokens)
        starts = [(max(first, sent_ends.get(layer, 0)), layer) for layer in layers]
        for start, group in groupby(starts, itemgetter(0)):
            alike = [layer for _, layer in group]
            if start < tokens.stop:
                piece = KvRange(start, tokens.stop - start, alike[0], len(alike))
                num_tokens = sequence.spec.num_tokens
                send = self._send(sequence.key, sequence.lease, piece, num_tokens, mark)
                self._sender.submit(send)
                sent_ends.update(dict.fromkeys(alike, tokens.stop))

    def commit(self, sequence: WorkerSequence, first_tokens: tuple[Sample, ...]) -> None:
        """Commit the handoff of a computed prompt with its first tokens."""
        sequence.stage = Stage.HANDING_OFF
        num_tokens = sequence.spec.num_tokens
        for send in self._records(sequence.key, sequence.lease, num_tokens):
            self._sender.submit(send)
        self._sender.submit(Finish(sequence.key, num_tokens, first_tokens, self._state.clock()))

    # Running sequences

    def apply(self, command: StreamCommand) -> None:
        group = self._state.groups.get((command.stream, command.handle))
        if group is None:
            return
        match command.command:
            case Pause():
                self._pause(group)
            case HandOff(ticket) if isinstance(group, WorkerSequence):
                self._hand_off(group, ticket)
            case Resume() if group.stage is Stage.PAUSED:
                group.stage = Stage.RUNNING

    def _pause(self, group: SequenceGroup) -> None:
        if group.stage in (Stage.PAUSED, Stage.HANDING_OFF, Stage.CLOSING):
            return
        is_movable = isinstance(group, WorkerSequence) and not group.is_prefilling
        if group.stage is not Stage.RUNNING or not is_movable:
            why = NotHandedOff(HandoffFailed.reason, "the sequence does not decode now")
            self._state.emit(group, why)
            return
        group.stage = Stage.PAUSED
        self._state.emit(group, Paused())

    def _hand_off(self, sequence: WorkerSequence, ticket: bytes) -> None:
        if sequence.stage is not Stage.PAUSED:
            return
        try:
            self._send_whole(sequence.key, ticket, sequence.lease, sequence.num_computed_tokens)
        except InvalidRequest as error:
            self._state.emit(sequence, NotHandedOff(error.reason, error.message))
            return
        sequence.stage = Stage.HANDING_OFF
        sequence.is_sending = True

    def cancel(self, sequence: WorkerSequence, reason: str, message: str) -> None:
        """Cancel a handoff. The sequence's blocks are released once the sender reports SendDone."""
        if sequence.is_sending:
            self._sender.submit(Cancel(sequence.key, reason, message))

    # Prefixes

    def serve_prefix(self, sequence: WorkerSequence, asked: PrefixRequested) -> None:
        """Send a held prefix to a worker that awaits it. This worker owns the blocks until
        `on_done`."""
        state, num_tokens = self._state, sequence.num_computed_tokens
        key = f"prefix {asked.ticket_id}"
        if key in state.served_prefixes or not num_tokens:
            return
        state.served_prefixes[key] = lease = sequence.lease.fork(num_tokens)
        try:
            self._send_whole(key, asked.deliver_to, lease, num_tokens)
        except InvalidRequest:
            # The asking worker stops waiting when its ticket expires.
            state.served_prefixes.pop(key).release()

    def _send_whole(self, key: Hashable, ticket: bytes, lease: BlockLease, num_tokens: int) -> None:
        """Send all KV. The receiver has the tokens already, so the commit carries none. Raises
        InvalidRequest for an invalid ticket."""
        whole = KvRange(0, num_tokens, 0, self._groups.layout.num_layers)
        send = self._send(key, lease, whole, num_tokens)
        records = self._records(key, lease, num_tokens)
        finish = Finish(key, num_tokens, (), self._state.clock())
        self._sender.begin(key, ticket, send, *records, finish)

    def _records(self, key: Hashable, lease: BlockLease, num_tokens: int) -> tuple[Send, ...]:
        """Sends of the state records after `num_tokens` tokens, all of which are computed."""
        records = self._groups.records_after(num_tokens)
        return tuple(Send(key, tuple(lease.block_ids), record) for record in records)

    def _send(
        self,
        key: Hashable,
        lease: BlockLease,
        piece: KvRange,
        num_tokens: int,
        mark: object = None,
    ) -> Send:
        """One send of a KV range, limited to what the lease holds and the receiver needs. mark: see
        Send."""
        whole_start = max(lease.whole_start, self._groups.whole_start(num_tokens))
        return Send(key, tuple(lease.block_ids), piece, mark, whole_start)

    # Ends

    def on_done(self, done: SendDone, sequence: WorkerSequence | None) -> None:
        """Handle the sender's SendDone. sequence: the one with its key, or None."""
        if lease := self._state.served_prefixes.pop(done.key, None):
            lease.release()
            return
        if done.key in self._rejected:
            self._rejected.remove(done.key)
            return
        if sequence is None:
            self._early_ends[done.key] = done
            return
        error = done.error and for_gateway(done.error)
        sequence.is_sending = False
        if sequence.stage is Stage.CLOSING:
            self._state.leave(sequence)
        elif sequence.stage is not Stage.HANDING_OFF:
            # Failed before its first tokens: retriable on another pair of workers.
            self._state.fail(sequence, error or EngineFault("a handoff ended before its commit"))
        elif error is None:
            self._state.emit(sequence, HandedOff())
            self._state.leave(sequence)
        elif sequence.spec.num_choices == 1 and not sequence.spec.sampling.beam:
            sequence.stage = Stage.PAUSED
            self._state.emit(sequence, NotHandedOff(error.reason, error.message))
        else:
            self._state.fail(sequence, error)


def for_gateway(error: BatonError) -> BatonError:
    """Map a handoff's failure for the gateway: retriable on another pair of workers, except
    internal faults."""
    if isinstance(error, RetriableError | EngineFault):
        return error
    return HandoffFailed(error.message)
