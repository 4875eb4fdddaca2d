"""The sending half of the KV channel, as an engine loop uses it: no call waits for a peer."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable

from baton.engine.interface import KvPool
from baton.errors import HandoffFailed, PeerMismatch
from baton.types import ANY_NUMERICS, KvLayout, KvRange, NumericsRule, Sample, WorkerIdentity
from kv_transfer.kv_secret import KvSecret
from kv_transfer.kv_ticket import KvTicket, parse_ticket
from kv_transfer.lane import Lane
from kv_transfer.lane_runner import InlineLane, LaneRunner, RunLane, ThreadLane
from kv_transfer.send_task import Begin, Borrow, Cancel, Finish, Send, SendDone, SenderConfig
from kv_transfer.transport.base import Connector

#: A bound only: a receiver tells how large its chunks may be.
DEFAULT_MAX_CHUNK_BYTES = 16 << 20

#: The lanes to a worker are numbered.
_LaneId = tuple[WorkerIdentity, int]

__all__ = ["KvTicket", "SendDone", "Sender", "parse_ticket"]


class Sender:
    """Sends sequences' KV to the workers that their tickets name, on up to num_lanes lanes per
    worker and boot.

    A handoff stays on one lane: that with the fewest handoffs when it begins, the first among
    equals. So a lane, with its connection and its thread, is made only when those before it are
    busy, and closes when it has been idle for long.

    Exactly one SendDone per `begin`, in a lane's thread (or, with is_inline, within the call that
    causes it). Until then the handoff's blocks may be read at any time. Calls about a key that is
    done do nothing. Thread-safe, unless
    is_inline: then all calls come from one thread.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        layout: KvLayout,
        pool: KvPool,
        connect: Connector,
        on_done: Callable[[SendDone], None],
        clock: Callable[[], float],
        connect_timeout_s: float = 5.0,
        ack_timeout_s: float = 10.0,
        idle_timeout_s: float = 60.0,
        max_chunk_bytes: int = DEFAULT_MAX_CHUNK_BYTES,
        *,
        num_lanes: int = 1,
        is_inline: bool = False,
        secret: KvSecret | None = None,
        rule: NumericsRule = ANY_NUMERICS,
    ) -> None:
        """clock: monotonic seconds. ack_timeout_s bounds the wait for a credit, and for the answer
        to a commit.

        secret: KV goes only to workers that have it, too; None: to whoever a ticket names. rule:
        which receivers.
        """
        self._config = SenderConfig(
            identity=identity,
            layout=layout,
            pool=pool,
            connect=connect,
            clock=clock,
            max_chunk_bytes=max_chunk_bytes,
            connect_timeout_s=connect_timeout_s,
            ack_timeout_s=ack_timeout_s,
            idle_timeout_s=idle_timeout_s,
            secret=secret,
            rule=rule,
        )
        self._user_on_done = on_done
        self._run_lane: RunLane = (
            InlineLane if is_inline else functools.partial(ThreadLane, clock=clock)
        )
        self._lock = threading.RLock()
        self._num_lanes = num_lanes
        self._lanes: dict[_LaneId, LaneRunner] = {}
        self._lane_of: dict[str, tuple[_LaneId, LaneRunner] | None] = {}
        self._num_handoffs: Counter[_LaneId] = Counter()
        self._last_heartbeat = clock()
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Handoffs whose SendDone is still to come."""
        with self._lock:
            return len(self._lane_of)

    def begin(self, key: str, ticket: bytes) -> None:
        """Open a handoff under a name of the caller's. Raises InvalidRequest (and there is no
        SendDone) if `ticket` is none, ValueError if `key` is in use."""
        parsed = parse_ticket(ticket)
        with self._lock:
            if key in self._lane_of:
                raise ValueError(f"a handoff {key!r} is under way")
            self._lane_of[key] = None
            is_closed = self._is_closed
        difference = self._config.layout.difference(parsed.layout)
        if difference:
            error = PeerMismatch.of(parsed.owner.worker_id, *difference)
            self._on_done(SendDone(key, error, 0))
        elif is_closed or not self._submit_first(Begin(key, parsed, ticket)):
            self._on_done(SendDone(key, HandoffFailed("the KV sender is closed"), 0))

    def send(self, key: str, block_ids: tuple[int, ...], piece: KvRange) -> None:
        """KV of this piece is final in the blocks. What the receiver holds already is not sent."""
        self._submit(Send(key, block_ids, piece))

    def borrow(self, key: str, lend_to: bytes) -> None:
        """Ask the receiver to send the KV that it holds to the owner of the ticket `lend_to`, in
        this worker."""
        self._submit(Borrow(key, lend_to))

    def commit(
        self, key: str, num_tokens: int, firsts: tuple[Sample, ...], prefill_end: float
    ) -> None:
        """All is computed: `firsts` follow `num_tokens` tokens, one for each choice. prefill_end:
        when, by the clock."""
        self._submit(Finish(key, num_tokens, firsts, prefill_end))

    def abort(self, key: str, reason: str, message: str) -> None:
        """Give a handoff up; its SendDone has the error of that reason."""
        self._submit(Cancel(key, reason, message))

    def heartbeat(self) -> None:
        """The engine loop is alive: tickets are kept from expiring for as long as this is
        called."""
        self._last_heartbeat = self._config.clock()
        with self._lock:
            lanes = tuple(self._lanes.values())
        for lane in lanes:
            lane.poll()

    def close(self) -> None:
        """End all handoffs, connections and threads; returns when none is left."""
        with self._lock:
            self._is_closed = True
            lanes = tuple(self._lanes.values())
            self._lanes.clear()
        for lane in lanes:
            lane.close()

    def _submit(self, task: Borrow | Send | Finish | Cancel) -> None:
        with self._lock:
            placed = self._lane_of.get(task.key)
        if placed:
            _, lane = placed
            lane.submit(task)

    def _submit_first(self, task: Begin) -> bool:
        """Give a handoff to the lane of its destination. False: the sender was closed meanwhile."""
        while True:
            with self._lock:
                if self._is_closed:
                    return False
                lane_id = self._least_busy(task.ticket.owner)
                lane = self._lanes.get(lane_id) or self._new_lane(lane_id)
                self._place(task.key, (lane_id, lane))
            if lane.submit(task):
                return True
            with self._lock:
                self._place(task.key, None)
                if self._lanes.get(lane_id) is lane:
                    del self._lanes[lane_id]

    def _least_busy(self, peer: WorkerIdentity) -> _LaneId:
        """Under the lock."""
        lane_ids = [(peer, number) for number in range(self._num_lanes)]
        return min(lane_ids, key=self._num_handoffs.__getitem__)

    def _place(self, key: str, placed: tuple[_LaneId, LaneRunner] | None) -> None:
        """Under the lock: count a handoff where it is now, and no more where it was."""
        if before := self._lane_of.get(key):
            self._num_handoffs[before[0]] -= 1
        self._lane_of[key] = placed
        if placed:
            self._num_handoffs[placed[0]] += 1

    def _new_lane(self, lane_id: _LaneId) -> LaneRunner:
        """Under the lock. Forgets lanes that have ended, so that a fleet's restarts do not pile
        up."""
        self._lanes = {at: lane for at, lane in self._lanes.items() if not lane.is_over}
        self._num_handoffs = +self._num_handoffs
        peer, number = lane_id
        lane = Lane(peer, self._config, lambda: self._last_heartbeat, self._on_done)
        name = f"baton-kv-send-{peer.worker_id}-{number}"
        self._lanes[lane_id] = self._run_lane(lane, name)
        return self._lanes[lane_id]

    def _on_done(self, done: SendDone) -> None:
        with self._lock:
            if done.key in self._lane_of:
                self._place(done.key, None)
                del self._lane_of[done.key]
        self._user_on_done(done)
