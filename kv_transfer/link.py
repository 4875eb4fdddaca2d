"""One connection to a receiver: what has been agreed on it, what it lets us send, and how long it
may be silent."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.errors import EngineFault, HandoffFailed
from baton.types import WorkerIdentity
from baton.v1 import kv_pb2
from kv_transfer.agreement import Terms
from kv_transfer.endpoint import Endpoint
from kv_transfer.frame import Frame, FrameError
from kv_transfer.greeting import SenderGreeting
from kv_transfer.outgoing import Chunks, chunk_of
from kv_transfer.send_task import SenderConfig

_log = logging.getLogger("baton.kv")


class Link:
    """The sender's end, until any method raises HandoffFailed: then it is over, and `close` all
    that may follow.

    terms, max_chunk_bytes: since the receiver's KvAccept; before it terms is None, and nothing but
    the greeting may be sent.
    """

    def __init__(
        self, config: SenderConfig, peer: WorkerIdentity, endpoints: Sequence[Endpoint]
    ) -> None:
        """Connects to the best of the endpoints. Raises TransportError."""
        self._config = config
        self._peer = peer
        self._greeted_by = config.clock() + config.connect_timeout_s
        self.connection = config.connect(endpoints, config.connect_timeout_s)
        self._greeting = SenderGreeting(config, peer, self.connection)
        self.terms: Terms | None = None
        self.max_chunk_bytes = 0
        # Since when the next chunk has had no room, without any credit coming.
        self._stalled_since: float | None = None

    def greet(self) -> None:
        """To be called first. Raises what Connection.send does."""
        self._greeting.say_hello()

    def take(self, frame: Frame) -> None:
        """A frame that is about no handoff. Raises PeerMismatch if the two cannot work together,
        FrameError if it has no place here."""
        match frame:
            case kv_pb2.KvAccept() if self.terms is None:
                self._open(frame)
            case kv_pb2.KvRefuse() if self.terms is None:
                raise self._greeting.refused(frame)
            case kv_pb2.KvCredit() if self.terms is not None:
                self._stalled_since = None
            case _:
                raise FrameError(f"{self._peer.worker_id} sent a {type(frame).__name__} now")

    def send_chunk(self, terms: Terms, work: Chunks, *, commits_next: bool) -> bool:
        """Send the next chunk of `work`, which has one. False: there is no room now.

        commits_next: the handoff's commit will follow the last of its chunks at once. Raises
        EngineFault if the blocks could not be read: of this handoff alone.
        """
        piece = work.next
        if piece is None:
            return True
        staged = self.connection.stage(terms.codec.wire.num_bytes(piece))
        if staged is None:
            if self._stalled_since is None:
                self._stalled_since = self._config.clock()
            return False
        try:
            chunk, filled = chunk_of(work, piece, staged, terms)
        except EngineFault:
            self.connection.unstage(staged)
            raise
        work.advance()
        self.connection.send(chunk, filled, more=commits_next and work.next is None)
        work.handoff.count(chunk)
        return True

    def deadline(self) -> float | None:
        """When the receiver must have said something; None: it need not."""
        if self.terms is None:
            return self._greeted_by
        if self._stalled_since is None:
            return None
        return self._stalled_since + self._config.ack_timeout_s

    def check_deadline(self) -> None:
        """Raises HandoffFailed if the receiver is late."""
        config, deadline = self._config, self.deadline()
        if deadline is None or config.clock() < deadline:
            return
        if self.terms is None:
            late = f"did not greet within {config.connect_timeout_s:g} s"
        else:
            late = f"took no KV for {config.ack_timeout_s:g} s"
        raise HandoffFailed(f"{self._peer.worker_id} {late}")

    def _open(self, accept: kv_pb2.KvAccept) -> None:
        config = self._config
        self.terms = self._greeting.accepted(accept)
        codec = self.terms.codec
        most = max(config.max_chunk_bytes, codec.wire.token_layer_bytes)
        self.max_chunk_bytes = min(most, accept.max_chunk_bytes)
        if not codec.is_plain:
            peer, dtype = self._peer.worker_id, config.layout.dtype
            _log.info("KV travels to %s as %s, not %s", peer, codec.wire.dtype, dtype)
