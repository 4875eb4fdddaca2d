"""A ticket: which sequence may be written into which blocks, by whom, until when; what its sender
is given of it, and where its owner takes KV.

    OFFERED ----> RESERVED ----> RECEIVING ----> COMMITTED ----> (forgotten)
       |   begin     |   pin         |   commit              release
       |             |               |
       +-------------+---------------+
             | abort, lease over, connection lost, broken rule
             v
          ABORTED ------------> (forgotten)
                     release

A ticket that needs no KV (all is cached) goes from RESERVED to COMMITTED. OFFERED waits for a
sender, RESERVED has one and belongs to its connection, RECEIVING has taken a first chunk. An offer
must be taken up within `offer_s`: a sender presents its ticket as soon as it has it, before it
queues for anything. From then on each arrow but the last has the lease as its deadline, which the
sender renews however long its own queue is.

Who owns the blocks: the table from `offer` until the ticket's one event; from then on whoever gets
the event. A writer holds a pin, and may write before what it writes is verified: nobody reads the
blocks before the commit. An abort that meets a pin refuses further ones at once, and TicketAborted
is reported when the last is gone.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from baton.errors import HandoffFailed, InvalidRequest
from baton.kv_transports import KV_TRANSPORTS
from baton.types import KvLayout, Sample, WorkerIdentity
from baton.v1 import kv_pb2
from baton.wire import layout_from_proto, layout_to_proto
from engine.kv.layout import LayerGroups, is_sound
from engine.kv.range import KvRange
from kv_transfer.frame import CHECKSUM_MASK

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_NUMBERS = {
    each.name: kv_pb2.KvTransport.Value(f"KV_TRANSPORT_{each.name.upper()}")
    for each in KV_TRANSPORTS
}
_NAMES = {number: name for name, number in _NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """transport: its name in baton.kv_transports. address: a Unix socket's path, host:port, or a
    name within the process, by the transport's scope. host_id: only of sockets' paths."""

    transport: str
    address: str
    host_id: str = ""

    def __str__(self) -> str:
        """For people."""
        return f"{self.transport} to {self.address}"


def local_host_id() -> str:
    """The kernel's boot id: equal for processes that may share memory; empty where the kernel gives
    none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


MAX_TICKET_BYTES = 16 * 1024
_MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class KvTicket:
    """The right to write one sequence's KV into blocks that `owner` has reserved; see
    baton.v1.KvTicket."""

    owner: WorkerIdentity
    ticket_id: int
    epoch: int
    request_id: str
    tenant: bytes
    num_cached_tokens: int
    num_tokens: int
    layout: KvLayout
    endpoints: tuple[Endpoint, ...]
    lease_s: float
    traceparent: str = ""


def common_fields(
    owner: WorkerIdentity, layout: KvLayout, endpoints: Iterable[Endpoint]
) -> kv_pb2.KvTicket:
    """What all tickets of a worker's boot have in common."""
    return kv_pb2.KvTicket(
        worker_id=owner.worker_id,
        generation=owner.generation,
        layout=layout_to_proto(layout),
        endpoints=[
            kv_pb2.KvEndpoint(
                transport=_NUMBERS[each.transport], address=each.address, host_id=each.host_id
            )
            for each in endpoints
        ],
    )


def signed_ticket(message: kv_pb2.KvTicket, secret: bytes) -> bytes:
    """The bytes of a ticket, with a digest of all its fields under `secret` (at most 64 bytes)."""
    message.mac = _mac(message, secret)
    return message.SerializeToString(deterministic=True)


def parse_ticket(data: bytes) -> KvTicket:
    """The fields of a ticket, whose genuineness its owner alone can check. Raises InvalidRequest if
    it is none."""
    message = ticket_message(data)
    layout = layout_from_proto(message.layout)
    if not (
        message.worker_id
        and message.ticket_id
        and message.lease_ms
        and message.num_cached_tokens <= message.num_tokens
        and is_sound(layout)
    ):
        raise InvalidRequest("the KV ticket lacks fields, or they contradict each other")
    return KvTicket(
        owner=WorkerIdentity(message.worker_id, message.generation),
        ticket_id=message.ticket_id,
        epoch=message.epoch,
        request_id=message.request_id,
        tenant=message.tenant,
        num_cached_tokens=message.num_cached_tokens,
        num_tokens=message.num_tokens,
        layout=layout,
        # A newer owner may offer transports that this version does not know.
        endpoints=tuple(
            Endpoint(_NAMES[each.transport], each.address, each.host_id)
            for each in message.endpoints
            if each.transport in _NAMES
        ),
        lease_s=message.lease_ms / 1000,
        traceparent=message.traceparent,
    )


def verify_ticket(data: bytes, owner: WorkerIdentity, secret: bytes) -> KvTicket:
    """The ticket, if `owner` made it under `secret` and not a bit of its meaning was changed.

    Raises InvalidRequest otherwise. Compares in constant time.
    """
    ticket = parse_ticket(data)
    if ticket.owner != owner:
        raise InvalidRequest(
            f"the ticket is of {ticket.owner.worker_id} generation {ticket.owner.generation}, "
            f"and this is {owner.worker_id} generation {owner.generation}"
        )
    message = ticket_message(data)
    if not hmac.compare_digest(message.mac, _mac(message, secret)):
        raise InvalidRequest("the ticket is not genuine")
    return ticket


def ticket_message(data: bytes) -> kv_pb2.KvTicket:
    """A ticket's message, unchecked. Raises InvalidRequest if it is none."""
    if len(data) > MAX_TICKET_BYTES:
        raise InvalidRequest(f"a KV ticket of {len(data)} bytes; at most {MAX_TICKET_BYTES} may be")
    try:
        return kv_pb2.KvTicket.FromString(data)
    except DecodeError:
        raise InvalidRequest("the bytes given as a KV ticket are none") from None


def _mac(message: kv_pb2.KvTicket, secret: bytes) -> bytes:
    """Digest of every field but the digest; unknown fields count, so they cannot be added
    either."""
    bare = kv_pb2.KvTicket()
    bare.CopyFrom(message)
    bare.ClearField("mac")
    data = bare.SerializeToString(deterministic=True)
    return hashlib.blake2b(
        data, key=secret, digest_size=_MAC_BYTES, person=b"baton-kv-ticket"
    ).digest()


class TicketState(enum.Enum):
    """See the drawing above."""

    OFFERED = "offered"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class OfferedTicket:
    """A ticket's number, and its bytes for the sender."""

    ticket_id: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TicketCommitted:
    """All KV of `num_tokens` tokens is in the blocks, which whoever gets this owns.

    first_tokens: the token after them, of each choice; none if it is known there already.
    whole_start: the first token that came in every group; groups that keep fewer than all tokens
    may have none before it.
    """

    ticket_id: int
    num_tokens: int
    first_tokens: tuple[Sample, ...]
    transfer_exposed_ms: float
    num_bytes: int
    reserved_s: float = 0.0
    """When the sender presented the ticket, by the table's clock."""
    receiving_s: float = 0.0
    """When its first chunk was taken; when the ticket was presented if none had to come."""
    whole_start: int = 0


@dataclass(frozen=True, slots=True)
class TicketAborted:
    """There will be no commit, and nothing writes the blocks any more. `reason` is one of
    baton.errors.BY_REASON."""

    ticket_id: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PrefixRequested:
    """The sender that holds this open ticket wants the KV of the tokens that are here sent to the
    owner of `deliver_to`."""

    ticket_id: int
    deliver_to: bytes


TicketEvent = TicketCommitted | TicketAborted | PrefixRequested


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a sender's frame was dropped: an answer for it, not an event of the ticket."""

    reason: str
    message: str


#: Called when a ticket is aborted, to warn its sender: its number, epoch, and why.
OnAborted = Callable[[int, int, Rejection], None]


@dataclass(frozen=True, slots=True)
class Commit:
    """What a sender says at the end: `checksum` is the sum modulo 2^64 of its chunks' checksums."""

    ticket_id: int
    epoch: int
    num_tokens: int
    first_tokens: tuple[Sample, ...]
    checksum: int
    exposed_ms: float


@dataclass(slots=True)
class Ticket:
    """A ticket's state, and the arrows of the drawing. Times are those of the caller's clock.

    block_ids: where tokens [num_cached_tokens, num_tokens) are to be written; min_tokens: the
    fewest that a commit may be of. held_start: the first token that has a block.
    connection: whose ticket it is, once it has been presented; on_aborted: of that connection.
    checksum, num_bytes: of all that has been written. data: what the sender was given to show.
    mark: see KvPool; of when the blocks became the ticket's.
    """

    ticket_id: int
    block_ids: tuple[int, ...]
    groups: LayerGroups
    min_tokens: int
    num_cached_tokens: int
    num_tokens: int
    coverage: Coverage
    lease_s: float
    deadline: float
    state: TicketState = TicketState.OFFERED
    connection: int | None = None
    on_aborted: OnAborted | None = None
    num_pins: int = 0
    checksum: int = 0
    num_bytes: int = 0
    aborted: TicketAborted | None = None
    reserved_s: float = 0.0
    receiving_s: float = 0.0
    data: bytes = b""
    mark: object = None
    held_start: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it may still be committed."""
        return self.state in _OPEN

    @property
    def is_settled(self) -> bool:
        """Whether its one event has been reported, or is being reported."""
        return self.state not in _OPEN and not self.num_pins

    @property
    def refusal(self) -> Rejection | None:
        """Why no frame of its sender can be taken any more, if so."""
        if self.aborted:
            return Rejection(self.aborted.reason, self.aborted.message)
        if self.state is TicketState.COMMITTED:
            return Rejection(HandoffFailed.reason, "the ticket is committed")
        return None

    def present(
        self, connection: int, on_aborted: OnAborted | None, now_s: float
    ) -> Rejection | None:
        """Its sender is here."""
        if self.aborted:
            return self.refusal
        if self.state is not TicketState.OFFERED:
            return Rejection(HandoffFailed.reason, "the ticket has been used")
        self.state = TicketState.RESERVED
        self.connection = connection
        self.on_aborted = on_aborted
        self.reserved_s = self.receiving_s = now_s
        self.renew(now_s)
        return None

    def renew(self, now_s: float) -> None:
        self.deadline = now_s + self.lease_s

    def pin(self, piece: KvRange, now_s: float) -> str:
        """Count `piece` as arrived, to be written until unpin; or what is wrong with it."""
        if not (
            piece.num_tokens > 0
            and piece.num_layers > 0
            and max(self.num_cached_tokens, self.held_start) <= piece.first_token
            and piece.end_token <= self.num_tokens
            and piece.first_layer >= 0
            and piece.end_layer <= self.groups.num_layers(piece.group)
            and self._has_place(piece)
        ):
            return f"a chunk outside of the reservation: {piece}"
        if not self.coverage.add(piece):
            return f"a chunk that came before: {piece}"
        if self.state is TicketState.RESERVED:
            self.receiving_s = now_s
        self.state = TicketState.RECEIVING
        self.num_pins += 1
        self.renew(now_s)
        return ""

    def _has_place(self, piece: KvRange) -> bool:
        """Whether no group of a piece begins before what is held of it."""
        groups = self.groups
        if not groups.has_partial or piece.first_token >= groups.whole_start(self.num_tokens):
            return True
        return all(groups[part.group].keeps_all_tokens for part in groups.split(piece))

    def unpin(self, checksum: int, num_bytes: int) -> TicketAborted | None:
        """The writer of one pin is done. What is to be reported now: an abort that has waited for
        it."""
        self.num_pins -= 1
        self.checksum = (self.checksum + checksum) & CHECKSUM_MASK
        self.num_bytes += num_bytes
        return None if self.num_pins else self.aborted

    def commit(self, commit: Commit) -> TicketCommitted | str:
        """All is sent, and here; or why not."""
        if not self.min_tokens <= commit.num_tokens <= self.num_tokens:
            return (
                f"a commit of {commit.num_tokens} tokens for {self.min_tokens} to {self.num_tokens}"
            )
        first, end = self.num_cached_tokens, commit.num_tokens
        whole_start = self.coverage.whole_start(first, end)
        if self.num_pins or whole_start is None:
            return "a commit of KV that has not all arrived"
        if self.checksum != commit.checksum:
            return "the checksum of all chunks is not what the sender says"
        self.state = TicketState.COMMITTED
        return TicketCommitted(
            self.ticket_id,
            commit.num_tokens,
            commit.first_tokens,
            commit.exposed_ms,
            self.num_bytes,
            self.reserved_s,
            self.receiving_s,
            whole_start,
        )

    def abort(self, reason: str, message: str) -> TicketAborted | None:
        """There will be no commit of this open ticket. What is to be reported now: nothing while a
        writer is in the blocks."""
        self.state = TicketState.ABORTED
        self.aborted = TicketAborted(self.ticket_id, reason, message)
        return None if self.num_pins else self.aborted


_OPEN = frozenset({TicketState.OFFERED, TicketState.RESERVED, TicketState.RECEIVING})


class Coverage:
    """Per run of layers, the disjoint, sorted, maximal token intervals that have arrived.

    Layers are counted within their group, so that those of one that came alike are one run whatever
    lies between them. A run is split where a piece needs it: most pieces are of all layers, and
    cost no more than one layer would.
    """

    def __init__(self, groups: LayerGroups) -> None:
        self._groups = groups
        self._runs = {
            group.number: [_LayerRun(0, group.num_layers, [], [])] for group in groups.all
        }

    def add(self, piece: KvRange) -> bool:
        """Count `piece` as arrived; False, with no interval changed, if any of it had arrived
        before."""
        start, end = piece.first_token, piece.end_token
        runs = [run for part in self._groups.split(piece) for run in self._runs_of(part)]
        if any(run.overlaps(start, end) for run in runs):
            return False
        for run in runs:
            run.insert(start, end)
        return True

    def whole_start(self, first_token: int, end_token: int) -> int | None:
        """The first token that has arrived in every group, if all that a sequence of end_token
        tokens lacks from first_token on has arrived, see LayerGroup.arrived_from, and nothing else;
        else None."""
        latest = first_token
        for group in self._groups.all:
            for run in self._runs[group.number]:
                start = group.arrived_from(run.starts, run.ends, first_token, end_token)
                if start is None:
                    return None
                latest = max(latest, start)
        return latest

    def _runs_of(self, part: KvRange) -> list[_LayerRun]:
        """Those that a group's range is made of. ALL is of the one group that there is then."""
        number = part.group if part.group in self._runs else self._groups.paged[0].number
        runs = self._runs[number]
        for layer in (part.first_layer, part.end_layer):
            _split(runs, layer)
        return [
            run
            for run in runs
            if part.first_layer <= run.first_layer and run.end_layer <= part.end_layer
        ]


def _split(runs: list[_LayerRun], layer: int) -> None:
    """Let a run begin at `layer`, unless all end there."""
    for index, run in enumerate(runs):
        if run.first_layer < layer < run.end_layer:
            rest = _LayerRun(layer, run.end_layer, run.starts.copy(), run.ends.copy())
            run.end_layer = layer
            runs.insert(index + 1, rest)
            return


@dataclass(slots=True)
class _LayerRun:
    """Layers [first_layer, end_layer) of a group, of which the same tokens have arrived: starts[i]
    <= token < ends[i], and ends[i] < starts[i + 1]."""

    first_layer: int
    end_layer: int
    starts: list[int]
    ends: list[int]

    def overlaps(self, start: int, end: int) -> bool:
        after = bisect_left(self.starts, end)
        return after > 0 and self.ends[after - 1] > start

    def insert(self, start: int, end: int) -> None:
        starts, ends = self.starts, self.ends
        at = bisect_left(starts, start)
        joins_next = at < len(starts) and starts[at] == end
        joins_previous = at > 0 and ends[at - 1] == start
        if joins_previous and joins_next:
            del starts[at], ends[at - 1]
        elif joins_previous:
            ends[at - 1] = end
        elif joins_next:
            starts[at] = start
        else:
            starts.insert(at, start)
            ends.insert(at, end)
